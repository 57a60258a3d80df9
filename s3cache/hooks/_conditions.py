"""What code that was compiled relies on beside its key: noted with the entry, held against a hit.

While it compiles, torch finds out more of a program than its key says, and tells Dynamo to guard
some of that: inputs that are one tensor, or that overlap in one storage. It writes absolute places
in storages into the code, and lowers a backward under the settings of the moment. None of it is
done on a hit. So it is noted on torch's own entry, in plain data, and goes wherever that goes: into
ours, into torch's directory, into the artifacts of ``torch.compiler.save_cache_artifacts``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.artifact import CONDITIONS
from s3cache.errors import CorruptError
from s3cache.graph import places
from s3cache.hooks._whole_guards import unbranched
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTConfig, AOTResult, CompiledGraph, TracingContext

__all__ = [
    "Compile",
    "Conditions",
    "Half",
    "UnrecordedError",
    "add_guards",
    "conditions_of",
    "described",
    "hold",
    "note_conditions",
    "note_half",
]

_ON_HALVES = "s3cache_half"


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


class Half(TypedDict):
    """What is noted of one half while it is lowered, until the entry is saved.

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
            places=places(inputs),
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


def note_half(graph: CompiledGraph, half: Half) -> None:
    """Keep with what a half was compiled to what was noted of it."""
    setattr(graph, _ON_HALVES, half)


def note_conditions(entry: AOTResult, compile_: Compile | None) -> Conditions:
    """Put what the code in ``entry`` relies on into it, before it is pickled.

    Raises:
        UnrecordedError: that cannot be noted.
    """
    context = internals.current_tracing_context.get()()
    if compile_ is None or context is None:
        raise UnrecordedError("nobody has seen it being compiled")
    halves: list[Half] = []
    for compiled in (entry.compiled_fw, entry.compiled_bw):
        half = None if compiled is None else getattr(compiled.result, _ON_HALVES, None)
        if compiled is not None and half is None:
            raise UnrecordedError("nobody has seen a half of it being compiled")
        if half is not None:
            halves.append(half)
    if any(half["late"] and half["lowered"] is None for half in halves):
        raise UnrecordedError("the settings that its backward was lowered under have no digest")
    conditions: Conditions = {
        "guards": list(compile_.added_guards(context)),
        "sizes": list(compile_.added_sizes(context)),
        "places": compile_.places if any(half["sees_places"] for half in halves) else None,
        "lowered": halves[-1]["lowered"],
        "of_threads": compile_.of_threads,
    }
    setattr(entry, CONDITIONS, conditions)
    return conditions


# -- on a hit


def conditions_of(entry: AOTResult) -> Conditions | None:
    """What the code in ``entry`` relies on; ``None`` if nothing was noted.

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
    """What has to hold for a hit beside torch's own guards, as text; ``None`` if nothing has."""
    relied = {name: conditions[name] for name in ("guards", "sizes", "places")}
    return json.dumps(relied) if any(relied.values()) else None


def hold(conditions: Conditions, inputs: Sequence[object]) -> bool:
    """Whether the code may be called with ``inputs``, for which a graph is looked up now."""
    expected = conditions["places"]
    if expected is not None and expected != places(inputs):
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
    """Tell Dynamo to guard what it was told when the entry was compiled.

    Args:
        sources: where Dynamo takes each input from.

    Raises:
        CorruptError: the entry has guards that cannot be made here.
    """
    if not conditions["guards"] and not conditions["sizes"]:
        return
    context = internals.current_tracing_context.get()()
    if context is None:
        raise CorruptError("entry", "has guards, and nobody checks them here")
    try:
        guards = [
            internals.guard_on(kind, [sources[i] for i in some], [sources[i] for i in others])
            for kind, some, others in conditions["guards"]
        ]
        for expression, _ in conditions["sizes"]:
            internals.guard_on_sizes(context, unbranched(expression))
    except (IndexError, TypeError, NameError, ValueError, AssertionError) as exc:
        raise CorruptError("entry", f"has guards that fit no input ({exc})") from exc
    context.guards_context.aotautograd_guards.extend(guards)
