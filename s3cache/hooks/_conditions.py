"""What code that was compiled relies on beside its key: noted with the entry, held against a hit.

While it compiles, torch finds out more of a program than its key says, and tells Dynamo to guard
some of that: inputs that are one tensor, or that overlap in one storage. It writes absolute places
in storages into the code, and lowers a backward under the settings of the moment. None of it is
done on a hit. So it is noted on torch's own entry, in plain data, and goes wherever that goes: into
ours, into torch's directory, into the artifacts of ``torch.compiler.save_cache_artifacts``.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.artifact import CONDITIONS
from s3cache.errors import CorruptError
from s3cache.graph import storage_offsets
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.hooks._patching import Patches
    from s3cache.torch_api.protocols import (
        AOTConfig,
        AOTResult,
        CompiledGraph,
        Function,
        TracingContext,
    )

__all__ = [
    "Compile",
    "Conditions",
    "FxInfo",
    "UnrecordedError",
    "add_guards",
    "attach_fx_info",
    "conditions_hold",
    "conditions_of",
    "described",
    "failing_conditions",
    "failing_guards",
    "install_guard_expressions",
    "note_conditions",
    "rewrite_min_max",
]

_FX_INFO = "s3cache_fx_info"
_MIN_OR_MAX = re.compile(r"\b(min|max)\(")
# How torch names the sizes that are inputs, in the guards of its entries, by number.
_NUMBERED = re.compile(r"L\['t(\d+)'\]")
# A variable of the function that is compiled.
_LOCAL = re.compile(r"L\['(\w+)'\]")


class Conditions(TypedDict):
    """Plain data, pickled with torch's entry.

    ``guards`` are kinds of AOTAutograd's guards and the inputs that each is on, by index.
    ``sizes`` are conditions on sizes that torch's entry leaves out, since some of them are no
    inputs (that of a storage): expressions, with the symbols in them and what those are sizes of.
    ``places`` says where inputs begin in storages; nil if the code does not depend on it.
    ``lowered`` is a digest of the settings that the backward was lowered under, if that was at the
    first call of it and not with the forward; ``of_threads`` what it was made with.
    """

    guards: list[tuple[str, list[int], list[int]]]
    sizes: list[tuple[str, dict[str, str]]]
    places: str | None
    lowered: str | None
    of_threads: bool


class FxInfo(TypedDict):
    """What is noted of an FX graph while it is lowered, until the entry is saved.

    ``late`` if it is a backward that is lowered when it is first called, under the settings of
    which ``lowered`` is the digest, if they have one.
    """

    sees_places: bool
    late: bool
    lowered: str | None


class UnrecordedError(Exception):
    """Something that the code relies on cannot be noted: its entry must not be used."""


# -- while a graph is compiled


@dataclass
class Compile:
    """One compile that is to end in an entry, from the lookup that missed to the next lookup.

    Attributes:
        key: under which it will be saved.
        of_threads: whether code is made for the number of threads.
        sources: where Dynamo takes each input from.
        symbols: those of sizes that are inputs: guards on these are in torch's entry.
        places: see :class:`Conditions`.
        guards, shapes, dynamos: how many guards there were before, of AOTAutograd's, on sizes,
            and of Dynamo's own.
        until: how many of the first two there were in the end, if it has ended.
        strays: whether there are guards of Dynamo's own among those that were added.
    """

    key: str
    of_threads: bool
    sources: Sequence[object]
    symbols: frozenset[object]
    places: str
    guards: int
    shapes: int
    dynamos: int
    until: tuple[int, int] | None = None
    strays: bool = False

    @classmethod
    def begun(
        cls,
        context: TracingContext,
        key: str,
        config: AOTConfig,
        inputs: Sequence[object],
        *,
        of_threads: bool,
    ) -> Compile:
        """The one that begins now."""
        guards, shapes = _counts(context)
        return cls(
            key=key,
            of_threads=of_threads,
            sources=config.aot_autograd_arg_pos_to_source or (),
            symbols=internals.symbols_of(inputs),
            places=storage_offsets(inputs),
            guards=guards,
            shapes=shapes,
            dynamos=len(context.guards_context.dynamo_guards),
        )

    def end(self, context: TracingContext) -> None:
        """What is added from now on is another graph's."""
        self.until = self.until or _counts(context)

    def look(self, context: TracingContext) -> None:
        """See what Dynamo's own guards are, as long as it still has them."""
        if self.until is None:
            self.strays |= len(context.guards_context.dynamo_guards) != self.dynamos

    def added_guards(self, context: TracingContext) -> Iterator[tuple[str, list[int], list[int]]]:
        """The guards that compiling it has added, by index of the inputs.

        Raises:
            UnrecordedError: there are some that nothing here stands for.
        """
        if self.strays:
            raise UnrecordedError("guards of Dynamo's own")
        until, _ = self.until or _counts(context)
        for guard in context.guards_context.aotautograd_guards[self.guards : until]:
            known = internals.sources_of_guard(guard)
            if known is None:
                raise UnrecordedError(f"a guard of an unknown kind ({type(guard).__name__})")
            kind, some, others = known
            yield kind, self._indices(some), self._indices(others)

    def added_sizes(self, context: TracingContext) -> Iterator[tuple[str, dict[str, str]]]:
        """The guards on sizes that it has added and that torch's entry leaves out.

        Raises:
            UnrecordedError: there is one on a size of which it is not known what it is of.
        """
        _, until = self.until or _counts(context)
        for guard in internals.shape_guards(context)[self.shapes : until]:
            if internals.symbols_in(guard) <= self.symbols:
                continue
            named = internals.named_symbols(context, guard)
            if named is None:
                raise UnrecordedError(f"a guard on something that has no name ({guard.expr})")
            yield internals.written_guard(guard), named

    def _indices(self, sources: Sequence[object]) -> list[int]:
        try:
            return [self.sources.index(source) for source in sources]
        except ValueError:
            raise UnrecordedError("a guard on something that is no input") from None


def _counts(context: TracingContext) -> tuple[int, int]:
    return len(context.guards_context.aotautograd_guards), len(internals.shape_guards(context))


def attach_fx_info(graph: CompiledGraph, info: FxInfo) -> None:
    """Keep what was noted of an FX graph with what it was compiled to."""
    setattr(graph, _FX_INFO, info)


def note_conditions(entry: AOTResult, compile_: Compile | None) -> Conditions:
    """Put what the code in ``entry`` relies on into it, before it is pickled.

    Raises:
        UnrecordedError: that cannot be noted.
    """
    context = internals.current_tracing_context.get()()
    if compile_ is None or context is None:
        raise UnrecordedError("its compile was not observed")
    infos: list[FxInfo] = []
    for compiled in (entry.compiled_fw, entry.compiled_bw):
        if compiled is not None:
            info: FxInfo | None = getattr(compiled.result, _FX_INFO, None)
            if info is None:
                raise UnrecordedError("the compile of its forward or backward was not observed")
            infos.append(info)
    if any(info["late"] and info["lowered"] is None for info in infos):
        raise UnrecordedError("the settings that its backward was lowered under have no digest")
    conditions: Conditions = {
        "guards": list(compile_.added_guards(context)),
        "sizes": list(compile_.added_sizes(context)),
        "places": compile_.places if any(info["sees_places"] for info in infos) else None,
        "lowered": infos[-1]["lowered"],
        "of_threads": compile_.of_threads,
    }
    setattr(entry, CONDITIONS, conditions)
    return conditions


# -- on a hit


def conditions_of(entry: AOTResult) -> Conditions | None:
    """Return what the code in ``entry`` relies on; ``None`` if nothing was noted.

    Raises:
        CorruptError: what is noted is something else.
    """
    noted: object = getattr(entry, CONDITIONS, None)
    if noted is None:
        return None
    if not isinstance(noted, Mapping) or set(noted) != set(Conditions.__annotations__):
        raise CorruptError("entry", "notes something unknown of what its code relies on")
    return cast("Conditions", noted)


def described(conditions: Conditions) -> str | None:
    """Return what a hit needs beside torch's own guards, as text; ``None`` if nothing."""
    relied = {name: conditions[name] for name in ("guards", "sizes", "places")}
    return json.dumps(relied) if any(relied.values()) else None


def conditions_hold(conditions: Conditions, inputs: Sequence[object]) -> bool:
    """Return whether the code may be called with ``inputs``, for which a graph is looked up."""
    expected = conditions["places"]
    if expected is not None and expected != storage_offsets(inputs):
        return False
    if not conditions["guards"] and not conditions["sizes"]:
        return True
    context = internals.current_tracing_context.get()()
    return (
        context is not None
        and all(
            internals.size_guard_holds(context, expression, named)
            for expression, named in conditions["sizes"]
        )
        and all(
            internals.guard_holds(
                context, kind, [inputs[i] for i in some], [inputs[i] for i in others]
            )
            for kind, some, others in conditions["guards"]
        )
    )


def add_guards(conditions: Conditions, sources: Sequence[object]) -> None:
    """Have Dynamo guard what it guarded when the entry was compiled.

    Args:
        sources: where Dynamo takes each input from.

    Raises:
        CorruptError: the entry has guards that cannot be made here.
    """
    if not conditions["guards"] and not conditions["sizes"]:
        return
    context = internals.current_tracing_context.get()()
    if context is None:
        raise CorruptError("entry", "has guards, and nothing checks them here")
    try:
        guards = [
            internals.guard_on(kind, [sources[i] for i in some], [sources[i] for i in others])
            for kind, some, others in conditions["guards"]
        ]
        for expression, _ in conditions["sizes"]:
            internals.guard_on_sizes(context, rewrite_min_max(expression))
    except (IndexError, TypeError, NameError, ValueError, AssertionError) as exc:
        raise CorruptError("entry", f"has guards that fit no input ({exc})") from exc
    context.guards_context.aotautograd_guards.extend(guards)


# -- guards on sizes


def install_guard_expressions(patches: Patches) -> None:
    """Have the guards of an entry evaluated without branches, so that a hit adds none.

    torch writes a guard such as ``Max(8, s0) <= s1`` as ``max(8, s0) <= s1`` and has Python
    evaluate it for the sizes of a hit. Python's own ``max`` takes a branch: ``s0 > 8`` is guarded
    too, and calls that the compiled code is right for are compiled again, as they are after hits of
    torch's own. torch has functions for both that take no branch.
    """

    def unbranching(original: Function[bool]) -> Function[bool]:
        def evaluate_guards_expression(shapes: object, code: str, args: Sequence[object]) -> bool:
            return original(shapes, rewrite_min_max(code), args)

        return evaluate_guards_expression

    patches.replace(internals.evaluate_guards_expression, unbranching)


def rewrite_min_max(expression: str) -> str:
    """Return the same condition on sizes, with torch's functions in place of ``min`` and ``max``.

    What cannot be parsed is returned as it is: evaluating it raises.
    """
    if _MIN_OR_MAX.search(expression) is None:
        return expression
    try:
        return ast.unparse(_MinMaxRewriter().visit(ast.parse(expression.strip(), mode="eval")))
    except SyntaxError:
        return expression


class _MinMaxRewriter(ast.NodeTransformer):
    """``max(a, b, c)`` becomes ``torch.sym_max(torch.sym_max(a, b), c)``."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ("min", "max") or node.keywords or len(node.args) < 2:
            return node
        function = ast.parse(f"torch.sym_{name}", mode="eval").body
        return functools.reduce(lambda one, other: ast.Call(function, [one, other], []), node.args)


# -- why an entry did not fit, for people: asked on a miss only, and nothing depends on it


def failing_guards(expression: str, inputs: Sequence[object]) -> list[str]:
    """Return which of torch's guards on sizes do not hold of ``inputs``, with these sizes.

    Args:
        expression: all of them, joined by ``and``.
    """
    sizes = internals.sizes_among(inputs)
    names = [
        _as_written(internals.name_of_size(size) or f"size {i}") for i, size in enumerate(sizes)
    ]
    values = [internals.value_of_size(size) for size in sizes]
    found = []
    for guard in _conjuncts(expression):
        if not internals.holds_of_sizes(guard, sizes, values):
            numbers = sorted({int(number) for number in _NUMBERED.findall(guard)})
            words = _NUMBERED.sub(lambda match: names[int(match[1])], guard)
            found.append(_failure(words, {names[number]: values[number] for number in numbers}))
    return found


def failing_conditions(
    conditions: Conditions, inputs: Sequence[object], sources: Sequence[object]
) -> list[str]:
    """Return which conditions of an entry do not hold of ``inputs``, in the order of checks.

    Args:
        sources: where Dynamo takes each input from.
    """
    return [
        *_failing_places(conditions["places"], inputs, sources),
        *_failing_sizes(conditions["sizes"]),
        *_failing_overlaps(conditions["guards"], inputs, sources),
    ]


def _conjuncts(expression: str) -> list[str]:
    tree = ast.parse(expression.strip(), mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(part) for part in parts]


def _failure(guard: str, values: Mapping[str, object]) -> str:
    here = ", ".join(f"{name} is {value}" for name, value in values.items())
    return f"guard `{guard}` does not hold{f': {here}' if here else ''}"


def _as_written(source: str) -> str:
    """``L['x'].size()[0]`` as the function that is compiled would have it: ``x.size()[0]``."""
    return _LOCAL.sub(r"\1", source)


def _input_name(number: int, sources: Sequence[object]) -> str:
    name = internals.name_of_source(sources[number]) if number < len(sources) else None
    return f"input {number}" + (f" ({_as_written(name)})" if name else "")


def _failing_places(
    expected: str | None, inputs: Sequence[object], sources: Sequence[object]
) -> Iterator[str]:
    """Of ``2@8/48``: where input 2 begins, in elements, and how large its storage is, in bytes."""
    if expected is None:
        return
    before, now = (
        dict(each.split("@") for each in of.split()) for of in (expected, storage_offsets(inputs))
    )
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            number = name.partition(".")[0]
            called = _input_name(int(number), sources) if number.isdigit() else f"input {name}"
            there, here = _begins(before.get(name)), _begins(now.get(name))
            yield f"{called} begins {there} in the entry, {here} here"


def _begins(place: str | None) -> str:
    if place is None:
        return "in no storage"
    start, _, size = place.partition("/")
    return f"at element {start} of a storage of {size} bytes"


def _failing_sizes(sizes: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    context = internals.current_tracing_context.get()()
    for expression, named in sizes:
        words = re.sub(r"\w+", lambda match: _as_written(named.get(match[0], match[0])), expression)  # noqa: B023
        if context is None:
            yield _failure(words, {})
        elif not internals.are_named(context, named):
            yield f"guard `{words}` is on sizes that are others here, or not dynamic"
        elif not internals.size_guard_holds(context, expression, named):
            values = {
                _as_written(source): internals.value_of_symbol(context, symbol)
                for symbol, source in named.items()
            }
            yield _failure(words, values)


def _failing_overlaps(
    guards: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    inputs: Sequence[object],
    sources: Sequence[object],
) -> Iterator[str]:
    context = internals.current_tracing_context.get()()
    for kind, some, others in guards:
        if context is not None and internals.guard_holds(
            context, kind, [inputs[i] for i in some], [inputs[i] for i in others]
        ):
            continue
        one, other = (", ".join(_input_name(i, sources) for i in of) for of in (some, others))
        if kind == "DuplicateInputs":
            yield f"{one} and {other} are one tensor in the entry, and two here"
        elif one and other:
            yield f"{one} overlap in the entry, and not with {other}; here it is otherwise"
        elif one:
            yield f"{one} overlap in memory in the entry; here they do not"
        else:
            yield f"{other} do not overlap in memory in the entry; here they do"
