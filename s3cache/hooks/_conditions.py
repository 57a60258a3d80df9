"""What compiled code relies on beside its key: noted with the entry, checked on a hit.

While it compiles, torch finds out more about a program than its key says, and tells Dynamo to guard
some of that: inputs that are one tensor, or that overlap in one storage. It writes absolute places
in storages into the code, and lowers a backward under the settings of the moment. None of it
happens on a hit. So it is noted on torch's own entry, in plain data, and goes wherever that goes:
into ours, into torch's directory, into the artifacts of ``torch.compiler.save_cache_artifacts``.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.artifact import CONDITIONS
from s3cache.errors import CorruptError
from s3cache.graph import Code, storage_offsets
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.hooks._state import Patches
    from s3cache.torch_api.protocols import (
        AOTConfig,
        AOTResult,
        Function,
        TracingContext,
    )

#: The attribute of a compiled graph that has what was noted of it, an :class:`FxInfo`.
FX_INFO = "s3cache_fx_info"
_MIN_OR_MAX = re.compile(r"\b(min|max)\(")


class Conditions(TypedDict):
    """Plain data, pickled with torch's entry.

    ``guards`` are kinds of AOTAutograd's guards and the inputs that each is on, by index.
    ``sizes`` are conditions on sizes that torch's entry leaves out, since some of them are no
    inputs (that of a storage): expressions, with the symbols in them and their sources.
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


class NotSharableError(Exception):
    """A compiled graph cannot be saved: no entry could hold it, or its code relies on too much."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code


def _unrecorded(what: str) -> NotSharableError:
    return NotSharableError("unrecorded", what)


# -- while a graph is compiled


class Compile:
    """One compile that is to end in an entry, from the lookup that missed to the next lookup."""

    def __init__(
        self,
        context: TracingContext,
        key: str,
        config: AOTConfig,
        inputs: Sequence[object],
        *,
        of_threads: bool,
    ) -> None:
        self.key = key
        self.of_threads = of_threads  # whether code is made for the number of threads
        self.places = storage_offsets(inputs)
        self._sources = config.aot_autograd_arg_pos_to_source or ()
        # Sizes that are inputs: guards on these are in torch's entry.
        self._symbols = internals.symbols_of(inputs)
        # How many of AOTAutograd's guards there are before, and on sizes; the same in the end.
        self._before = _counts(context)
        self._until: tuple[int, int] | None = None
        self._dynamos = len(context.guards_context.dynamo_guards)
        self._strays = False  # whether guards of Dynamo's own were added

    def end(self, context: TracingContext) -> None:
        """Leave what is added from now on to another graph."""
        self._until = self._until or _counts(context)

    def look(self, context: TracingContext) -> None:
        """Count Dynamo's own guards, as long as it still has them."""
        if self._until is None:
            self._strays |= len(context.guards_context.dynamo_guards) != self._dynamos

    def added_guards(self, context: TracingContext) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield the guards that compiling it has added, by index of the inputs."""
        if self._strays:
            raise _unrecorded("guards of Dynamo's own")
        until, _ = self._until or _counts(context)
        for guard in context.guards_context.aotautograd_guards[self._before[0] : until]:
            known = internals.sources_of_guard(guard)
            if known is None:
                raise _unrecorded(f"a guard of an unknown kind ({type(guard).__name__})")
            kind, some, others = known
            yield kind, self._indices(some), self._indices(others)

    def added_sizes(self, context: TracingContext) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the guards on sizes that it has added and that torch's entry leaves out."""
        _, until = self._until or _counts(context)
        for guard in internals.shape_guards(context)[self._before[1] : until]:
            if internals.symbols_in(guard) <= self._symbols:
                continue
            named = internals.named_symbols(context, guard)
            if named is None:
                raise _unrecorded(f"a guard on something that has no name ({guard.expr})")
            yield internals.written_guard(guard), named

    def _indices(self, sources: Sequence[object]) -> list[int]:
        try:
            return [self._sources.index(source) for source in sources]
        except ValueError:
            raise _unrecorded("a guard on something that is no input") from None


def _counts(context: TracingContext) -> tuple[int, int]:
    return len(context.guards_context.aotautograd_guards), len(internals.shape_guards(context))


def note_conditions(entry: AOTResult, compile_: Compile | None) -> Conditions:
    """Put what the code in ``entry`` relies on into it, before it is pickled."""
    context = internals.current_tracing_context.get()()
    if compile_ is None or context is None:
        raise _unrecorded("its compile was not observed")
    infos: list[FxInfo] = []
    for compiled in (entry.compiled_fw, entry.compiled_bw):
        if compiled is not None:
            info: FxInfo | None = getattr(compiled.result, FX_INFO, None)
            if info is None:
                raise _unrecorded("the compile of its forward or backward was not observed")
            infos.append(info)
    if any(info["late"] and info["lowered"] is None for info in infos):
        raise _unrecorded("the settings that its backward was lowered under have no digest")
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
    """Return what the code in ``entry`` relies on; ``None`` if nothing was noted."""
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
    """Have Dynamo guard what it guarded when the entry was compiled, of inputs from ``sources``."""
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

    def evaluate(
        original: Function[bool], shapes: object, code: str, args: Sequence[object]
    ) -> bool:
        return original(shapes, rewrite_min_max(code), args)

    patches.wrap(internals.evaluate_guards_expression, evaluate)


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
    """Turn ``max(a, b, c)`` into ``torch.sym_max(torch.sym_max(a, b), c)``."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ("min", "max") or node.keywords or len(node.args) < 2:
            return node
        function = ast.parse(f"torch.sym_{name}", mode="eval").body
        return functools.reduce(lambda one, other: ast.Call(function, [one, other], []), node.args)
