"""Record what Dynamo reads while it traces a frame, and make a candidate of it."""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, cast

from s3cache.features.recall import dynamo, names
from s3cache.features.recall.candidate import (
    BY_VALUE,
    Candidate,
    constants_in,
    digest,
    first_read,
    is_dense,
    names_in,
    packed,
    renamed,
)
from s3cache.features.recall.content import (
    NOT_COMPARED,
    OF_MODULE,
    OF_OPTIMIZER,
    OWN_KINDS,
    WITHOUT_ORDER,
    ContentDescriber,
    check_native,
    is_environment,
    is_layout,
)
from s3cache.features.recall.guards import WHOLE, guard_row, is_of_optimizer
from s3cache.features.recall.questions import Question, question_rows
from s3cache.features.recall.sets import watch
from s3cache.features.recall.sources import (
    BUILTINS,
    NAMED_TUPLES,
    OWN_BUILTINS,
    STATE,
    Plain,
    RefusedError,
    Source,
    Sources,
    builtins_of,
    is_imported,
    name_of_module,
    without_marks,
)
from s3cache.features.recall.traced_graph import TracedGraph
from s3cache.graph import (
    PLAIN_KINDS,
    UnidentifiedError,
    origin_of,
    origin_of_file,
    placement,
)
from s3cache.torch_api import internals

# Sources without an object before the frame runs, or that are checked as part of the process.
_OF_NO_OBJECT = frozenset(
    """
    ConstantSource GlobalStateSource NumpyTensorSource FloatTensorSource ShapeEnvSource
    TensorPropertySource TorchFunctionModeStackSource
    """.split()  # noqa: SIM905 - one word a line is harder to read
)

# Attributes that Dynamo reads without a source: where code is, what a view belongs to, functions
# of identity, and methods with results that have a seed or an address.
_IN_NO_TEXT = frozenset(
    """
    __hash__ __reduce_ex__ __repr__ __subclasscheck__ _base co_filename co_firstlineno co_lines
    co_lnotab co_linetable co_positions f_lineno is_ is_not lineno
    tb_frame tb_lasti tb_lineno tb_next
    """.split()  # noqa: SIM905 - one word a line is harder to read
)


# In texts of objects and modules.
_PLACE = re.compile("0x[0-9a-fA-F]{6}|<module .* from ")


@dataclass(frozen=True, eq=False)
class PythonFrame:
    """A frame that Dynamo is about to compile."""

    code: types.CodeType
    names: dict[str, object]
    variables: Mapping[str, object]
    closure: object


@dataclass(eq=False)
class Recording:
    """The record of one trace of a frame, filled by hooks."""

    frame: PythonFrame
    reads: list[tuple[Source, object]] = field(default_factory=list)
    sourceless: list[object] = field(default_factory=list)
    made: set[str] = field(default_factory=set)  # texts without a source
    groups: list[tuple[Any, ...]] = field(default_factory=list)  # of optimizers, see Candidate
    # Sets with an order that counts, by source, and constant ones.
    ordered: set[Source | frozenset[object]] = field(default_factory=set)
    asked: list[Question] = field(default_factory=list)
    lookups: list[Any] = field(default_factory=list)  # of graphs, with their outcomes
    dynamic: list[str] = field(default_factory=list)
    refused: RefusedError | None = None
    candidate: Candidate | None = None  # set after the trace, before guards are built
    split: list[Any] | None = None  # how DDP's parts are called
    # The graphs from Dynamo, or why they cannot be saved.
    graphs: list[TracedGraph | RefusedError] = field(default_factory=list)
    _graph: Any = None
    _reads_environment: bool = False

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Keep the first error as the reason why the frame cannot be recalled; it is compiled."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001
            if isinstance(exc, UnidentifiedError):
                exc = RefusedError("object", f"reads {exc}")
            elif not isinstance(exc, RefusedError):
                exc = RefusedError("error", repr(exc))
            self.refused = self.refused or exc

    def note_constant(self, value: object, source: Source | None = None, **_: object) -> None:
        """Note a text that Dynamo makes."""
        if source is None and type(value) is str:
            self.made.add(value)

    def note_method_of_optimizer(self, variable: Any, _: object, name: str, *args: Any) -> None:
        """Note a call of a method of an optimizer, if it makes the state."""
        if name == "_init_group":
            self.note_optimizer(variable, _, *args)

    def note_optimizer(
        self, variable: Any, _: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Note a call of the method in which an optimizer makes its state; Dynamo runs it."""
        optimizer = variable.value
        with self.refusing():
            if origin_of(type(optimizer)._init_group).kind != "torch":
                raise RefusedError("object", "runs a method of an optimizer that is not torch's")
            (group, *values), named = variable.get_python_args(*args, **kwargs)
            groups = optimizer.param_groups
            number = next(number for number, it in enumerate(groups) if it is group)
            self.groups.append((variable.source, len(optimizer.state), number, values, named))

    def note_trace(self, graph: Any, *, filtered: bool) -> None:
        """Store the reads while all objects are unchanged; raise an error to refuse the frame."""
        self._check_trace(graph, filtered=filtered)
        self._graph = graph
        candidate = Candidate()
        sources = Sources(self.frame.variables, self.frame.names)
        contents = ContentDescriber()
        guards = [guard for guard in sorted(graph.guards) if not is_of_optimizer(guard)]
        candidate.guards = [guard_row(guard, sources) for guard in guards]
        candidate.key_order = sorted(map(sources.number, graph.guard_on_key_order))
        candidate.groups = [
            [sources.number(source), before, number, *map(sources.plain, [args, [*kwargs.items()]])]
            for source, before, number, args, kwargs in self.groups
        ]
        places = self._describe(self._all_reads(guards), graph, contents, sources, candidate)
        for row in candidate.guards:
            if row[0] in WHOLE and row[1] not in candidate.symbols:
                row[4] = digest(contents.whole(sources.at(row[1])))
        imports: dict[str, str] = dict(graph.import_sources)
        # An earlier attempt to trace the frame may have imported a module.
        for number, (kind, *values) in enumerate(sources.rows):
            if kind == "GlobalSource" and str(values[0]).startswith(dynamo.IMPORT):
                imports[values[0]] = sources.at(number).__name__
        imports |= sources.modules
        candidate.imports = sorted(map(list, imports.items()))
        code, closure = self.frame.code, self.frame.closure
        candidate.dynamic = [
            [name, places[name], dynamo.varying(code, closure, name, sources.at(places[name]))]
            for name in self.dynamic
            if name in places
        ]
        self._check_code(graph, contents, candidate)
        candidate.rows = sources.rows
        self.candidate, self._sources = candidate, sources

    def _check_trace(self, graph: Any, *, filtered: bool) -> None:
        if filtered:
            raise RefusedError("filter", "has a user's filter for guards")
        if graph.random_calls:
            raise RefusedError("random", "draws random numbers in Python")
        if graph.aotautograd_guards:
            raise RefusedError("aliasing", "has inputs that share memory")
        if dynamo.varies_by_history(graph, self.reads):
            raise RefusedError("guard", "lets sizes vary because of earlier calls")
        if graph.torch_function_subclass_inlined or graph.torch_function_mode_stack:
            raise RefusedError("subclass", "runs a user's __torch_function__")

    def _all_reads(self, guards: Iterable[Any]) -> list[tuple[Source, object]]:
        """Return the reads, also of guards and keys; those of an optimizer's state are last."""
        import torch

        # The text of a module says whether it has hooks.
        modules = {
            without_marks(each) for each, value in self.reads if isinstance(value, torch.nn.Module)
        }
        guarded = [
            guard.originating_source
            for guard in guards
            if not (
                guard.create_fn_name() == "EMPTY_NN_MODULE_HOOKS_DICT"
                and without_marks(guard.originating_source.base) in modules
            )
        ]
        reads = [*self.reads, *((each, None) for each in guarded), *_keys_of_tables(self.reads)]
        return sorted(reads, key=lambda read: self._is_of_state(read[0]))

    def _is_of_state(self, source: Source) -> bool:
        return any(f"{optimizer.name}.state" in source.name for optimizer, *_ in self.groups)

    def _describe(
        self,
        reads: Iterable[tuple[Source, object]],
        graph: Any,
        contents: ContentDescriber,
        sources: Sources,
        candidate: Candidate,
    ) -> dict[str, int]:
        """Describe what is read at each place; return the places by Dynamo's names."""
        symbols = {str(source) for source in graph.shape_env.source_to_var}
        concrete = partial(map, names.concrete_size.get())  # None for a symbol
        sizes = {
            source: [[*concrete(both["size"])], [*concrete(both["stride"])]]
            for source, both in graph.input_source_to_sizes_strides.items()
        }
        codes = (self.frame.code, *graph.tracing_context.traced_code)
        of_optimizers = {id(tensor) for tensor in self._tensors_of_optimizers(sources)}
        places: dict[str, int] = {}
        seen: set[Source] = set()
        first: dict[int, int] = {}
        whole = candidate.read_as_a_whole()
        for source, value in reads:
            if source in seen or type(source).__name__ in _OF_NO_OBJECT:
                continue
            seen.add(source)
            number = sources.number(source)
            try:
                there = sources.at(number)
            except Exception as exc:
                raise RefusedError("source", f"reads {source.name} only once ({exc!r})") from exc
            if value is not None and there is not value and not _is_same(there, value):
                raise RefusedError("source", f"reads {source.name}, which is another object now")
            places[source.name] = number
            if candidate.late < 0 and self._is_of_state(source):
                candidate.late = len(candidate.reads)
            same = first_read(there, first, len(candidate.reads))
            if source.name in symbols and type(there) in (int, float):
                candidate.symbols.append(number)
                candidate.reads.append([number, digest(f"any {type(there).__name__}"), same, 0])
                continue
            role = OF_OPTIMIZER if id(there) in of_optimizers else self._role(source, there)
            single = None if number in whole else contents.by_single_keys(there)
            self._reads_environment |= single is not None and is_environment(there)
            text = contents.of(there, role) if single is None else single
            if not _is_in_no_result(source, codes):
                check_native(there)
            candidate.reads.append([number, digest(text), same, role])
            if is_dense(there):
                shape = sizes.get(source) or (list(there.size()), list(there.stride()))
                candidate.sizes.append([number, *shape])
        return places

    def note_set(self, variable: Any, items: Iterable[object] = ()) -> None:
        """Note a set that Dynamo reads or makes, and whether its order becomes part of the result.

        ``items`` are what Dynamo makes it of: of another set, in an order that varies.
        """
        source, kind = variable.source, variable.python_type()
        if source is None and kind is frozenset and variable.is_python_constant():
            source = variable.as_python_constant()
        if source is not None:
            watch(variable, lambda: self.ordered.add(source))
        elif kind in (set, frozenset) and len(variable.items) > 1:
            in_place = not isinstance(items, (set, frozenset))
            watch(variable, self._refuse_order, in_place=in_place)

    def _refuse_order(self) -> None:
        why = "uses the order of a set that it makes, which varies"
        self.refused = self.refused or RefusedError("object", why)

    def _role(self, source: Source, value: object) -> int:
        import torch

        if isinstance(value, torch.Tensor):
            is_of_module = source.guard_source.is_unspecialized_nn_module()
            return OF_MODULE if is_of_module or STATE.search(source.name) is not None else 0
        is_set = isinstance(value, (set, frozenset)) and source not in self.ordered
        return WITHOUT_ORDER if is_set else 0

    def _tensors_of_optimizers(self, sources: Sources) -> Iterator[object]:
        for source, *_ in self.groups:
            optimizer = sources.at(sources.number(source))
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from state.values()

    def _check_code(self, graph: Any, contents: ContentDescriber, candidate: Candidate) -> None:
        """Check that the reads describe all code that took part in the trace."""
        contents.note(self.frame.code, self.frame.names)
        codes = contents.codes
        mentioned: set[str] = set()  # names in the traced code
        read: dict[str, dict[str, Any]] = {}  # modules, by name
        libraries: dict[str, str] = {}
        strings = [value for _, value in self.reads if type(value) is str]
        for code in (self.frame.code, *graph.tracing_context.traced_code):
            origin = origin_of_file(code.co_filename)
            if origin.kind in OWN_KINDS:
                continue
            strings += [each for each in constants_in(code) if type(each) is str]
            if any(type(each) is frozenset and each in self.ordered for each in constants_in(code)):
                raise RefusedError("object", "uses the order of a set in its code, which varies")
            names = codes.get(code)
            if names is None:
                if origin.kind != "library":
                    raise RefusedError("code", f"runs {code.co_name}, which has no source")
                libraries[origin.name.partition(" ")[0]] = origin.name
                continue
            mentioned |= names_in(code) | {
                each for each in constants_in(code) if type(each) is str and each.isidentifier()
            }
            where = "" if names is self.frame.names else str(names.get("__name__", ""))
            read[where] = names
        placed = (text for text in self.made.difference(strings) if _PLACE.search(text))
        if (text := next(placed, None)) is not None:
            raise RefusedError("object", f"makes a text with an address or a path: {text[:80]}")
        if unread := mentioned.union(self.made, strings) & _IN_NO_TEXT:
            raise RefusedError("source", f"may read {min(unread)}, which is not compared")
        if self._reads_environment and (own := next(filter(NOT_COMPARED.match, strings), None)):
            raise RefusedError("source", f"may read {own}, which is not compared")
        read |= {each.__name__: vars(each) for each in contents.modules}
        candidate.absent = [
            [where, sorted(mentioned - read[where].keys())] for where in sorted(read)
        ]
        candidate.libraries = sorted(map(list, libraries.items()))
        for value in self.sourceless:
            is_known = isinstance(value, enum.Enum) or is_layout(value)
            if internals.is_opaque_type.get()(type(value)) and not is_known:
                raise RefusedError("object", f"makes a {type(value).__qualname__}")
            file = None
            if isinstance(value, types.FunctionType) and value.__code__ not in codes:
                file = value.__code__.co_filename
            elif isinstance(value, type) and not contents.knows(value):
                file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file is not None and origin_of_file(str(file)).kind not in OWN_KINDS:
                raise RefusedError("code", f"uses {value!r}, which has no source")

    def note_graph(self, gm: Any) -> None:
        """Keep a graph that Dynamo hands to Inductor, which changes it."""
        try:
            self.graphs.append(TracedGraph.of(gm))
        except RefusedError as exc:
            self.graphs.append(exc)
        except Exception as exc:  # noqa: BLE001 - a graph with an entry is found without this
            self.graphs.append(RefusedError("error", repr(exc)))

    def finish(self, code: types.CodeType, *, has_places: bool, by_key: bool) -> Candidate:
        """Return the candidate with the final bytecode of the frame, or raise RefusedError.

        ``by_key`` says whether the keys of its graphs decide what they compute.
        """
        candidate = self.candidate
        if candidate is None:
            raise self.refused or RefusedError("error", "was not traced to its end")
        graph = self._graph
        mentioned = names_in(code)
        names: dict[str, str] = {}
        for name in sorted(graph.installed_globals & mentioned):
            value = self.frame.names.get(name)
            if name.startswith(dynamo.COMPILED):
                if candidate.compiled:
                    raise RefusedError("graphs", "calls several graphs")
                candidate.compiled = names[name] = "__s3cache_compiled"
            elif name.startswith(BUILTINS):
                names[name] = OWN_BUILTINS
            elif name.startswith(dynamo.RESUME) and isinstance(value, types.FunctionType):
                names[name] = f"__s3cache_resume_{len(candidate.resumes)}"
                candidate.resumes.append(self._resume(names[name], value))
            elif isinstance(value, types.ModuleType) and is_imported(value):
                names[name] = name_of_module(value)
                candidate.imports.append([names[name], value.__name__])
            elif name not in graph.import_sources:
                raise RefusedError("global", f"its bytecode needs {name}")
        self._add_graph(candidate, has_places=has_places, by_key=by_key)
        if not candidate.has_keys:
            candidate.traced = self.traced_graph(candidate)
        candidate.questions = question_rows(
            self.asked, self._sources, builtins_of(self.frame.names)
        )
        try:
            candidate.code = packed(renamed(code, names), self._constant_row)
        except ValueError as exc:
            others = (x for x in constants_in(code) if type(x) not in (*PLAIN_KINDS, tuple))
            odd = [x for x in others if self._constant_row(x) is None]
            raise RefusedError("constant", f"needs one of {odd} in its bytecode") from exc
        candidate.outcome = digest(
            repr(
                [
                    _code_text(renamed(code, names)),
                    candidate.graphs,
                    candidate.traced,
                    [each[0] for each in candidate.resumes],
                ]
            )
        )
        return candidate

    def _constant_row(self, value: Any) -> Plain | None:
        """Return a constant of the bytecode as plain data; a class has a source, or is torch's."""
        if isinstance(value, type):
            source = next((source for source, read in self.reads if read is value), None)
            if source is not None:
                return ["read", self._sources.number(source)]
            is_torchs = origin_of(value).kind == "torch"
            return cast("Plain", self._sources.plain(value)) if is_torchs else None
        if isinstance(value, types.MethodType) and isinstance(value.__self__, type):
            row = self._constant_row(value.__self__)
            name = value.__func__.__name__
            is_there = getattr(value.__self__, name, None) == value
            return None if row is None or not is_there else ["method", row, name]
        return dynamo.constant_row(value)

    def _resume(self, placeholder: str, value: types.FunctionType) -> list[Any]:
        if value.__closure__ is not None:  # a factory that makes the function with a closure
            inside = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
            code, is_factory = inside["code"].cell_contents, True
        else:
            code, is_factory = value.__code__, False
        return [placeholder, packed(code, self._constant_row), code.co_name, is_factory]

    def _add_graph(self, candidate: Candidate, *, has_places: bool, by_key: bool) -> None:
        if not candidate.compiled:
            if self.lookups:
                raise RefusedError("graphs", "looks up a graph that it does not call")
            return
        parts = 1 if self.split is None else sum(row[0] == "part" for row in self.split)
        if len(self.lookups) != parts:
            raise RefusedError("graphs", f"looks up {len(self.lookups)} graphs for {parts}")
        values: list[Any] = []
        by_key &= all(lookup.key and not lookup.reasons for lookup in self.lookups)
        for lookup in self.lookups:
            known_sources = [each for each in lookup.sources if each is not None]
            if self.split is None and len(known_sources) < len(lookup.sources):
                raise RefusedError("graphs", "has an input of the graph without a source")
            numbers = [*map(self._sources.number, known_sources)]
            candidate.graphs.append([lookup.key if by_key else "", numbers, lookup.bound])
            values += map(self._sources.at, numbers)
        candidate.split = self.split
        candidate.facts = [str(has_places), *placement(values, has_places=has_places)]

    def traced_graph(self, candidate: Candidate) -> list[Any]:
        """Return Dynamo's graph for the candidate, or raise RefusedError."""
        what = "an entry" if candidate.has_keys else "a key"
        if len(self.graphs) != 1 or self.split is not None:
            raise RefusedError("second-level", f"has several graphs, and one without {what}")
        (graph,), ((_, numbers, _),) = self.graphs, candidate.graphs
        try:
            if isinstance(graph, RefusedError):
                raise graph
            inputs = [*map(self._sources.at, numbers)]
            return graph.saved(inputs, self._place_of, self._sources.at)
        except RefusedError as exc:
            raise RefusedError("second-level", f"has a graph without {what}, and {exc}") from exc

    def _place_of(self, function: object) -> int:
        source = next((source for source, read in self.reads if read is function), None)
        if source is None:
            raise RefusedError("graphs", f"calls {function!r}, which has no source")
        return self._sources.number(source)


def _keys_of_tables(
    reads: Iterable[tuple[Source, object]],
) -> Iterator[tuple[Source, object]]:
    """Yield the tensors by which dictionaries are ordered, as further reads."""
    import torch

    key_at = names.sources.get().ConstDictKeySource
    for source, table in reads:
        if isinstance(table, dict):
            for number, key in enumerate(table):
                if isinstance(key, torch.Tensor):
                    yield key_at(source, number), key


class _Lookups(NamedTuple):
    """Functions of Python that use a number of an object only for a lookup in a table of their own.

    ``own`` is their code. No other code may have a name of ``names``, and code of the program or a
    library none of ``seen`` either, as it may then see the table.
    """

    own: frozenset[types.CodeType]
    names: frozenset[str]
    seen: frozenset[str]


#: By the name of the builtin that makes the number.
_LOOKUPS: Final[Mapping[str, _Lookups]] = {
    "hash": _Lookups(
        frozenset({enum.Enum.__hash__.__code__}), frozenset({"hash", "__hash__"}), frozenset()
    ),
    "id": _Lookups(
        frozenset(
            function.__code__
            for function in (*vars(copy).values(), inspect.unwrap)
            if isinstance(function, types.FunctionType)
        ),
        frozenset({"id"}),
        frozenset({"deepcopy", "__deepcopy__"}),
    ),
}


def _is_in_no_result(source: Source, codes: Collection[types.CodeType]) -> bool:
    """Return whether a source is a builtin with a result that only lookups of Python use.

    Then the traced code contains neither the hash of an enum nor the identity of a copied object.
    """
    base, name = getattr(source, "base", None), getattr(source, "index", None)
    if name not in _LOOKUPS or BUILTINS not in getattr(base, "name", ""):
        return False
    lookups = _LOOKUPS[str(name)]
    for code in codes:
        if code not in lookups.own:
            is_own = origin_of_file(code.co_filename).kind in OWN_KINDS
            bad = lookups.names if is_own else lookups.names | lookups.seen
            named = (code.co_name, *names_in(code), *constants_in(code))
            if any(type(x) is str and x in bad for x in named):
                return False
    return not lookups.own.isdisjoint(codes)


def _code_text(code: types.CodeType) -> str:
    """Return the text of code without its location."""
    inner = [
        _code_text(each) if isinstance(each, types.CodeType) else f"{type(each).__name__} {each!r}"
        for each in code.co_consts
    ]
    return repr([code.co_code, code.co_names, code.co_varnames, code.co_freevars, inner])


def _is_same(there: object, read: object) -> bool:
    if there is NAMED_TUPLES:  # in place of one that is equal
        return True
    if isinstance(there, types.MethodType) and isinstance(read, types.MethodType):
        return there.__func__ is read.__func__ and there.__self__ is read.__self__
    if type(there) is not type(read):
        return False
    return (isinstance(there, BY_VALUE) and there == read) or there != there
