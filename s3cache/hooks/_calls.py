"""Calls of torch into its cache: keying, lookups and saves, at two levels."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from s3cache.cache import CandidateLookup, Hit
from s3cache.graph import BypassReason
from s3cache.stats import EntryKind
from s3cache.store import Buffer
from s3cache.torch_api import Internal, internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTResult, CompiledGraph, DynamoObject

#: The result of a compile at a level.
Result: TypeAlias = "AOTResult | CompiledGraph"
#: A candidate of torch's lookup: result, its pickle, whether it is from the local tier.
Candidate: TypeAlias = tuple[Result, bytes, bool]


class Level(NamedTuple):
    """A level of torch's caches, with the internals of torch that both levels have."""

    name: EntryKind
    label: str  # in logs
    result: Internal[type[AOTResult]] | Internal[type[CompiledGraph]]
    candidates: Internal[Function[Iterator[Candidate]]]
    write: Internal[Function[None]]
    asks_remote: Internal[Function[bool]]
    remote_cache: Internal[Function[object]]
    uses_torchs_remote: Internal[Function[bool]]  # according to torch's own options


AOT = Level(
    "aot",
    "",
    internals.aot_result,
    internals.iterate_over_candidates,
    internals.write_to_local_cache,
    internals.should_use_remote_cache,
    internals.remote_cache,
    internals.uses_remote_cache,
)
FX = Level(
    "fx",
    ", second level",
    internals.compiled_graph,
    internals.fx_candidates,
    internals.fx_write_to_local_cache,
    internals.should_use_remote_fx_here,
    internals.fx_remote_cache,
    internals.should_use_remote_fx_cache,
)
LEVELS = (AOT, FX)


def compile_ns(result: Result) -> tuple[int, int]:
    """Return how long the forward and the backward took to compile."""
    if isinstance(result, internals.compiled_graph.get()):
        return int(result._time_taken_ns or 0), 0
    whole = cast("AOTResult", result)
    return int(whole.forward_time_taken_ns), int(whole.backward_time_taken_ns)


@dataclass(eq=False)
class CacheCall:
    """One call of torch into its cache, from start to end.

    torch swallows errors of its cache. The first one is kept here, so that strict mode can raise it
    where torch no longer swallows errors.
    """

    inputs: Sequence[object] = ()  # of the graph, once its key is computed
    key: str | None = None  # of the graph, if it has one
    reasons: tuple[BypassReason, ...] = ()  # why the graph has no key
    # Whether torch computes its own key now, because the graph has none of ours; and that key.
    alone: bool = False
    torch_key: str | None = None
    error: Exception | None = None  # the first error
    kernels: Mapping[str, Buffer] | None = None  # of the entry that is being rebuilt, if any
    modules: dict[str, str] = field(default_factory=dict)  # its Python code, by torch's paths
    code_of: Callable[[str], CodeType | None] = lambda _: None  # its code, compiled

    @property
    def codes(self) -> str:
        """The codes of the reasons, without duplicates."""
        return " ".join(dict.fromkeys(reason.code for reason in self.reasons))

    def record_error(self, error: Exception) -> None:
        """Keep ``error`` if it is the first."""
        self.error = self.error or error

    def raise_error(self, *, strict: bool) -> None:
        """Raise the first error, if there is one, in strict mode."""
        if strict and self.error is not None:
            raise self.error


class FxKeying(CacheCall):
    """One call of Inductor for the key of an FX graph."""


@dataclass(eq=False, kw_only=True)
class Lookup(CacheCall):
    """One lookup of torch."""

    level: Level
    sources: Sequence[object] = ()  # Dynamo's sources of the inputs
    number: int = -1  # AOTAutograd's number of the graph
    entries: CandidateLookup | None = None  # under its key, once torch asks for them
    hit: Hit | None = None  # the entry that torch checks or rebuilds now, if it is ours
    result: object = None  # unpickled from the hit
    # Whether settings are as at the compile of the forward, if this is known without their digest.
    as_before: Callable[[], bool] | None = None
    about: dict[str, object] = field(default_factory=dict)  # shown in torch's traces
    saved_s: float = 0.0  # seconds of compiling that the accepted entry has saved
    left: Sequence[tuple[str, str]] = ()  # what it leaves to the program's first calls, and why
    refused: str = ""  # why ``on_miss="error"`` refuses the hit
    # For each entry that was not used, a function that returns the reasons.
    rejected: list[Callable[[], Iterable[str]]] = field(default_factory=list)

    def withdraw(self) -> None:
        """Forget the current entry: torch no longer checks or rebuilds it."""
        self.hit, self.result, self.kernels = None, None, None

    def reject(self, error: Exception) -> None:
        """Set the current entry aside because it cannot be used."""
        assert self.entries is not None
        assert self.hit is not None
        self.record_error(error)
        self.rejected.append(lambda: [f"cannot be used: {error}"])
        self.entries.reject(self.hit, error)
        self.withdraw()

    first: object = None  # the callable that torch has made of the hit, until its first call
    holder: DynamoObject | None = None  # torch's object that calls it
    donates: bool = False  # whether the backward may write into inputs that are not needed then

    def hit_of(self, result: object) -> Hit | None:
        """Return the entry that ``result`` was unpickled from, if it is ours."""
        return self.hit if self.result is result else None


class Limits(NamedTuple):
    """Where code can run, beyond what its key says.

    Attributes:
        where: plain data in the entry for the feature that understands it; ``None``: wherever its
            key is looked up.
        relied: what every process that uses the code must have; empty if any process can use it.
    """

    where: Mapping[str, object] | None = None
    relied: Mapping[str, object] = MappingProxyType({})


@dataclass(eq=False, kw_only=True)
class Save(CacheCall):
    """One call of torch's ``save``."""

    level: Level
    key: str
    result: Result
    is_shared: bool  # whether we save it; otherwise torch does, unchanged
    in_directory: bool = True  # whether torch's directory gets results that cannot be shared
    limits: Limits = Limits()
    is_delayed: bool = False  # whether the upload waits: a better entry will soon replace it


# -- the line of the user's program that torch compiles

_NO_FILE = re.compile(r"<(?!stdin>|string>)")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def users_line() -> tuple[str, int, str] | None:
    """Return file, line and function of the first frame outside of torch that called the compiler.

    Frames between our caller and Dynamo belong to users' backends and do not count.
    """
    compiler, torchs = _places()
    found = None
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_filename
        if name.startswith(compiler):
            found = None
        elif found is None and not name.startswith(torchs) and not _NO_FILE.match(name):
            found = name, frame.f_lineno, frame.f_code.co_name
    return found


@functools.cache
def _places() -> tuple[str, tuple[str, ...]]:
    torch = internals.torch_directory()
    stdlib = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    # Files of the standard library with frames in between.
    between = (stdlib + "contextlib.py", stdlib + "functools.py", stdlib + "threading.py")
    return os.path.join(torch, "_dynamo") + os.sep, (torch, _OURS, *between)
