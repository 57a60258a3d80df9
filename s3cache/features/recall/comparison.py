"""Compare a candidate with the live objects of a frame, in one walk."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from s3cache.features.recall import dynamo, names
from s3cache.features.recall.candidate import Candidate, digest, first_read, is_dense
from s3cache.features.recall.content import ContentDescriber, is_layout, tensor_guarded
from s3cache.features.recall.guards import (
    BY_ARGUMENT,
    OF_PROCESS,
    WHOLE,
    build_guards,
    check_guard,
)
from s3cache.features.recall.questions import changed
from s3cache.features.recall.recording import PythonFrame
from s3cache.features.recall.sources import (
    NAMED_TUPLES,
    OWN_BUILTINS,
    OWN_NAMED_TUPLES,
    Plain,
    Sources,
    builtins_of,
)
from s3cache.features.recall.traced_graph import Compilation
from s3cache.graph import origin_of_file, placement


class FrameComparison:
    """The comparison of a candidate with a frame.

    Attributes:
        difference: the first difference in words; ``""`` if there is none.

    ``contents`` may have texts of objects from other comparisons, if nothing has changed since.
    """

    def __init__(
        self, candidate: Candidate, frame: PythonFrame, contents: ContentDescriber
    ) -> None:
        self.candidate, self._frame, self._contents = candidate, frame, contents
        self._places = Sources(frame.variables, frame.names, candidate.rows)
        self._added: list[str] = []  # global names of modules
        # Items that optimizers have added to their state.
        self._states: list[tuple[dict[object, object], dict[object, object]]] = []
        self._compilation: Compilation | None = None
        self.difference = "cannot be compared"
        try:
            self.difference = self._difference()
        finally:
            self.withdraw_state()  # Dynamo may trace the frame
            if self.difference:  # a trace must not find names that it would not have made
                for alias in self._added:
                    del frame.names[alias]

    def _difference(self) -> str:
        candidate, frame, places = self.candidate, self._frame, self._places
        for alias, name in candidate.imports:
            module = sys.modules.get(name)
            if module is None:
                return f"module {name} is not imported"
            if alias not in frame.names:
                self._added.append(alias)
            if frame.names.setdefault(alias, module) is not module:
                return f"{alias} is another module"
        frame.names[OWN_BUILTINS] = builtins_of(frame.names)
        frame.names[OWN_NAMED_TUPLES] = NAMED_TUPLES
        for where, absent in candidate.absent:
            inside = frame.names if not where else vars(sys.modules.get(where, _NOTHING))
            for name in absent:
                if name in inside:
                    return f"{name} is defined in {where or 'the module'}"
        for package, version in candidate.libraries:
            file = getattr(sys.modules.get(package), "__file__", None)
            if not file or origin_of_file(file).name != version:
                return f"library {package}"
        contents, symbols = self._contents, set(candidate.symbols)
        first: dict[int, int] = {}
        whole = candidate.read_as_a_whole()
        for index, (number, expected, same, role) in enumerate(candidate.reads):
            if index == candidate.late and (difference := self._make_state()):
                return difference
            try:
                value = places.at(number)
            except Exception as exc:  # noqa: BLE001 - whatever is not there any more
                return f"{places.source(number).name} ({type(exc).__name__})"
            is_symbol = number in symbols and type(value) in (int, float)
            if is_symbol:
                text = f"any {type(value).__name__}"
            else:
                single = None if number in whole else contents.by_single_keys(value)
                text = contents.of(value, role) if single is None else single
            if digest(text) != expected or first_read(value, first, index) != same:
                return str(places.source(number).name)
        for number, sizes, strides in candidate.sizes:
            value = places.at(number)
            if not is_dense(value) or not (
                _fit(sizes, value.size()) and _fit(strides, value.stride())
            ):
                return f"size of {places.source(number).name}"
        for kind, number, args, kwargs, guarded in candidate.guards:
            if kind in WHOLE and guarded is not None:
                if digest(contents.whole(places.at(number))) != guarded:
                    return str(places.source(number).name)
            elif kind in BY_ARGUMENT and check_guard(places, kind, number, args, kwargs) != guarded:
                return f"{kind} of {places.source(number).name}"
        if question := changed(candidate.questions, places, builtins_of(frame.names)):
            return f"the answer to {question}"
        for expression in candidate.expressions:
            if not places.holds(expression):
                return f"guard {expression}"
        sizes = {number: both for number, *both in candidate.sizes}
        for name, number, before in candidate.dynamic:
            for what in dynamo.varying(frame.code, frame.closure, name, places.at(number)):
                # What varied before, and is fixed, is fixed by the code.
                if what not in before and _is_fixed(what, sizes.get(number), number in symbols):
                    return f"{places.source(number).name} may vary now"
        if candidate.graphs:
            has_places = candidate.facts[0] == "True"
            inputs = [places.at(each) for _, numbers, _ in candidate.graphs for each in numbers]
            if placement(inputs, has_places=has_places) != candidate.facts[1:]:
                return "the layout of inputs in memory"
            if not candidate.has_keys and self.compilation() is None:
                return "a value in the graph"
        # torch keeps the first module that it imports by a name: from now on, these ones.
        for alias, name in candidate.imports:
            is_torchs = alias.startswith(dynamo.IMPORT)
            if is_torchs and names.import_module.get()(name) is not frame.names[alias]:
                return f"{alias} is another module"
        return ""

    def _make_state(self) -> str:
        """Let optimizers make their state, as in a trace; return a difference if it is another."""
        for number, before, index, args, kwargs in self.candidate.groups:
            optimizer = self._places.at(number)
            state = optimizer.state
            if len(state) != before:
                return f"{self._places.source(number).name}.state"
            positional: Any = self._places.argument(args)
            named: Any = self._places.argument(kwargs)
            try:
                optimizer._init_group(optimizer.param_groups[index], *positional, **dict(named))
            finally:
                self._states.append((state, dict([*state.items()][before:])))
        return ""

    def withdraw_state(self) -> None:
        """Take away what :meth:`restore_state` puts back."""
        for state, added in self._states:
            for key in added:
                del state[key]

    def restore_state(self) -> None:
        """Put back the state of optimizers that the comparison has made."""
        for state, added in self._states:
            state.update(added)

    def optimizers(self) -> list[Any]:
        """Return the optimizers that make their state in the frame."""
        return [self._places.at(number) for number, *_ in self.candidate.groups]

    def graphs(self) -> Iterator[tuple[str, list[Any], list[Any], int]]:
        """Yield the key of each graph, its current inputs, their sources, how many it holds."""
        for key, numbers, bound in self.candidate.graphs:
            sources = [self._places.source(number) for number in numbers]
            yield key, [*map(self._places.at, numbers)], sources, bound

    def compilation(self) -> Compilation | None:
        """Return the compile of Dynamo's graph; None if it is not saved, or may be another now."""
        candidate, places = self.candidate, self._places
        if self._compilation is None and candidate.traced is not None:
            ((_, numbers, _),) = candidate.graphs
            compilation = Compilation(candidate.traced, [*map(places.at, numbers)], places.at)
            self._compilation = compilation if compilation.is_as_traced() else None
        return self._compilation

    def seen(self) -> list[tuple[str, object]]:
        """Return the inputs with sizes that Dynamo would remember, by Dynamo's names."""
        return [(name, self._places.at(number)) for name, number, _ in self.candidate.dynamic]

    def constant_of(self, row: Plain) -> object:
        """Return a constant of the bytecode, which may be a class that the frame reads."""
        kind, *values = row
        if kind == "read":
            return self._places.at(values[0])
        if kind == "method":
            return getattr(self.constant_of(values[0]), values[1])
        return self._places.argument(row) if kind == "class" else dynamo.constant_of(row)

    def guards(self, state: object) -> Callable[[dict[str, object]], Any]:
        """Return a function that builds torch's guards at the next call, or None if they fail.

        The guards are made from live values, so they are only built while the values are unchanged.
        """
        candidate, frame, places = self.candidate, self._frame, self._places
        before = self._state(places)

        def build(variables: dict[str, object]) -> Any:
            now = Sources(variables, frame.names, candidate.rows)
            try:
                if self._state(now) != before or not all(map(now.holds, candidate.expressions)):
                    return None
            except Exception:  # noqa: BLE001 - whatever is not there any more
                return None
            if dynamo.is_under_modes() or dynamo.state_text(state) != dynamo.state_text(None):
                return None
            return build_guards(candidate, places, frame.code, variables, frame.names, state)

        return build

    def _state(self, places: Sources) -> list[object]:
        """Return the state of all guarded values that the guards check."""
        # torch also checks the order of some tables, without a separate guard.
        state: list[object] = [
            [
                key if type(key) is str else _Same(key)
                # A dictionary may have its own iteration; a set has none.
                for key in (dict.keys(table) if isinstance(table, dict) else table)
            ]
            for table in map(places.at, self.candidate.key_order)
        ]
        symbols = set(self.candidate.symbols)
        ignored = names.skips_module_hooks.get()
        sizes = {number: both for number, *both in self.candidate.sizes}
        for kind, number, args, kwargs, _ in self.candidate.guards:
            if kind in OF_PROCESS or (kind == "EMPTY_NN_MODULE_HOOKS_DICT" and ignored):
                continue
            value = places.at(number)
            if kind in BY_ARGUMENT:
                about: object = check_guard(places, kind, number, args, kwargs)
            else:
                about = _guarded_state(kind, value, number in symbols, sizes.get(number))
            state.append([type(value), about])
        return state


class _Same:
    """An object that is compared by identity."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _guarded_state(kind: str, value: Any, is_symbol: bool, sizes: list[Any] | None) -> object:
    """Return the state that torch's guard of a kind checks, besides the class."""
    if kind == "TENSOR_MATCH":
        static = sizes and [
            [None if one is None else other for one, other in zip(some, found, strict=False)]
            for some, found in zip(sizes, (value.size(), value.stride()), strict=True)
        ]
        return [tensor_guarded(value), static]
    if kind in WHOLE:
        if is_symbol:
            return None
        is_code = callable(value) or isinstance(value, (types.ModuleType, types.CodeType))
        return _Same(value) if is_code else repr(value)
    if is_layout(value):
        return ContentDescriber().of(value)
    if kind in ("SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT"):
        return len(value)
    if kind in ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"):
        is_plain = all(type(key) in (str, int, bool, float, type(None)) for key in value)
        return [*map(repr if is_plain else _Same, dict(value))]
    if kind in ("TYPE_MATCH", "BOOL_MATCH", "NONE_MATCH", "NOT_NONE_MATCH"):
        return value if type(value) is bool else value is None
    if kind == "CLOSURE_MATCH" and isinstance(value, types.FunctionType):
        return _Same(value.__code__)
    if isinstance(value, types.MethodType):  # every access makes a new one
        return [_Same(value.__func__), _Same(value.__self__)]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__name__, _Same(value.__self__)]
    return _Same(value)


def _is_fixed(what: str, sizes: list[list[int | None]] | None, is_symbol: bool) -> bool:
    """Return whether a candidate has one value for what :func:`dynamo.varying` names."""
    if what == "number":
        return not is_symbol
    kind, dim = what.split()
    values = sizes[kind == "stride"] if sizes else []
    return int(dim) < len(values) and values[int(dim)] not in (None, 0, 1)


def _fit(expected: list[int | None], found: Any) -> bool:
    return len(expected) == len(found) and all(
        one is None or one == other for one, other in zip(expected, found, strict=True)
    )


_NOTHING = types.ModuleType("nothing")
