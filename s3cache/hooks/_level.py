"""What the two levels of torch's caches share: whole graphs (AOT) and FX graphs.

A lookup goes through the entries under a key: each is unpickled, its guards are checked, and
torch's own code makes the one that fits into a callable. What torch compiles instead is saved: its
result, kernels and description become a frame. What cannot be shared goes to torch's directory, as
it would without s3cache. Each lookup is recorded, and shown in torch's traces.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from s3cache.artifact import Artifact, unpickled
from s3cache.cache import CandidateLookup, Engine, Hit, Saved
from s3cache.errors import CorruptError, code_of
from s3cache.graph import Code
from s3cache.hooks._conditions import NotSharableError, failing_guards
from s3cache.hooks._kernels import Kernels, portable
from s3cache.hooks._keys import CacheCall, CompileState, KeyHook, Patches
from s3cache.records import Record
from s3cache.stats import Level as LevelName
from s3cache.stats import Reason
from s3cache.torch_api import Internal, internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from s3cache.hooks._compiles import PendingCompiles
    from s3cache.hooks._distributed import RankConsensus
    from s3cache.hooks._watching import Bypasses
    from s3cache.torch_api.protocols import AOTResult, CompiledGraph

lookups, saves = logger_of("lookups"), logger_of("saves")

#: What torch goes through in a lookup: result, its pickle, whether it is of this machine.
Candidate: TypeAlias = tuple[object, bytes, bool]
# Under one key there may be any number of entries, of which these say enough.
_MAX_REJECTED = 16


class Guarded(Protocol):
    """What torch compiles at a level."""

    guards_expr: str | None


_Result = TypeVar("_Result", bound=Guarded)
_Call = TypeVar("_Call", bound=CacheCall)


@dataclass(eq=False, kw_only=True)
class Lookup(CacheCall):
    """One lookup of torch's."""

    level: LevelName
    sources: Sequence[object] = ()  # where Dynamo takes each input from
    consensus: RankConsensus | None = None  # where ranks have to agree on hits
    entries: CandidateLookup | None = None  # under its key, once torch asks for them
    hit: Hit | None = None  # the entry that torch checks or rebuilds now, if it is one of ours
    result: object = None  # what was unpickled of it
    saved_s: float = 0.0  # seconds of compiling that the accepted entry has saved
    # Functions that say why each entry was not used.
    rejected: list[Callable[[], list[str]]] = field(default_factory=list)

    def withdraw(self) -> None:
        """Have torch check and rebuild no entry of ours any more."""
        self.hit, self.result, self.kernels = None, None, None

    def reject(self, error: Exception) -> None:
        """Set the current entry aside, which cannot be used."""
        assert self.entries is not None
        assert self.hit is not None
        self.record_error(error)
        self.rejected.append(lambda: [f"cannot be used: {error}"])
        self.entries.reject(self.hit, error)
        self.withdraw()

    def hit_of(self, result: object) -> Hit | None:
        """Return the entry that ``result`` was unpickled from, if it was one of ours."""
        return self.hit if self.result is result else None


@dataclass(eq=False, kw_only=True)
class Save(CacheCall, Generic[_Result]):
    """One save of torch's."""

    level: LevelName
    key: str
    result: _Result
    is_shared: bool  # whether it is ours; what torch keeps to itself stays as torch made it
    in_directory: bool = True  # whether torch keeps in its directory what cannot be shared
    relies_on: str | None = None  # see :class:`Artifact`


class Shared(NamedTuple):
    """What both levels of torch's caches have, each at a place of its own."""

    result: Internal[type[AOTResult]] | Internal[type[CompiledGraph]]  # what torch compiles
    candidates: Internal[Function[Iterator[Candidate]]]
    write: Internal[Function[None]]
    asks_remote: Internal[Function[bool]]
    remote_cache: Internal[Function[object]]
    uses_torchs_remote: Internal[Function[bool]]  # as torch's own options have it


@dataclass(eq=False)
class Level(ABC, Generic[_Result]):
    """Puts a cache before torch's own directory of entries; each hook names what it replaces."""

    name: ClassVar[LevelName]
    label: ClassVar[str] = ""
    shared: ClassVar[Shared]

    _engine: Engine
    _state: CompileState
    _keys: KeyHook
    _kernels: Kernels
    _compiles: PendingCompiles
    _bypasses: Bypasses
    _is_shown: bool = field(default=False, init=False)
    _warned: set[str] = field(default_factory=set, init=False)
    _has_hit: bool = field(default=False, init=False)

    # -- what differs from level to level

    @abstractmethod
    def _graphs(self, result: _Result) -> list[object]:
        """Return the compiled FX graphs in ``result``."""

    @abstractmethod
    def _compile_ns(self, result: _Result) -> tuple[int, int]:
        """Return what compiling forward and backward took."""

    @abstractmethod
    def _refused(self, code: Code, error: Exception) -> None:
        """Count and log something that was compiled and cannot be shared."""

    def _misfit(self, result: _Result, lookup: Lookup) -> Callable[[], list[str]] | None:
        """Return what says why ``result`` does not fit torch's inputs; ``None`` if it fits.

        torch checks its own guards. A CorruptError says that it can be used nowhere.
        """

    def _prepare(self, saving: Save[_Result]) -> None:
        """Note with a result what its entry must have."""

    def _described(self, saving: Save[_Result]) -> dict[str, object]:
        """Return what the header says of this level's results alone."""
        return {}

    def _is_provisional(self) -> bool:
        """Return whether a better entry may soon replace one that is saved now."""
        return False

    def _saved(self, saving: Save[_Result], saved: Saved, size: int) -> None:
        """Act on an entry that was saved."""

    def install_shared(self, patches: Patches) -> None:
        """Replace what both levels have."""
        _, candidates, write, asks_remote, remote_cache, uses_torchs_remote = self.shared

        def ask_remote(original: Callable[[], bool]) -> bool:  # torch logs it, too
            ours = self._engine.has_remote and internals.tiers_asked(self.name).remote
            return original() or ours

        def only_if_asked(original: Callable[[], object]) -> object:  # torch's own
            return original() if uses_torchs_remote.get()() else None

        patches.wrap(candidates, self._candidates)
        patches.wrap(write, self._write)
        patches.wrap(asks_remote, ask_remote)
        patches.wrap(remote_cache, only_if_asked)

    def show_in_traces(self) -> None:
        """Show lookups and saves in torch's traces from now on."""
        self._is_shown = True

    # -- lookups

    def _current(self, kind: type[_Call]) -> _Call | None:
        """Return the current call of torch into this level, if it is of that kind."""
        call = self._state.current
        if isinstance(call, kind) and getattr(call, "level", None) == self.name:
            return call
        return None

    @contextlib.contextmanager
    def _shown(self, name: str) -> Iterator[dict[str, object]]:
        """Show the block in torch's traces, if it makes any, with what is put into the mapping.

        That is the log of ``TORCH_TRACE``, and ``torch.profiler``. An error ends no program.
        """
        about: dict[str, object] = {"level": self.name}
        end = None
        if self._is_shown and internals.is_traced():
            with contextlib.suppress(Exception):
                end = internals.begin_event(name, time.time_ns())
        try:
            yield about
        finally:
            if end is not None:
                with contextlib.suppress(Exception):
                    end(time.time_ns(), about)

    def _candidates(
        self, original: Function[Iterator[Candidate]], cls: type, *args: object, **kwargs: object
    ) -> Iterator[Candidate]:
        lookup = self._current(Lookup)
        if lookup is not None:
            if self._keys.is_shared(lookup.key):
                yield from self._entries(lookup)
            lookup.withdraw()
        if self._engine.uses_trusted_only:
            return  # torch's own are not signed
        for candidate in original(cls, *args, **kwargs):
            if lookup is None or self._misfit(cast("_Result", candidate[0]), lookup) is None:
                yield candidate

    def _entries(self, lookup: Lookup) -> Iterator[Candidate]:
        try:
            asked = internals.tiers_asked(self.name)
            lookup.entries = self._engine.candidates(str(lookup.key), self.name, **asked._asdict())
            for hit in lookup.entries:
                lookup.hit = hit
                try:
                    content = bytes(Artifact.entry_of(hit.entry, self.name))
                    result = unpickled(content)
                    if not isinstance(result, self.shared.result.get()):
                        raise CorruptError("entry", f"holds a {type(result).__name__}")
                    misfit = self._misfit(cast("_Result", result), lookup)
                    # What torch rebuilds has the kernels of this entry alone.
                    lookup.result, lookup.modules = result, {}
                    lookup.kernels = Artifact.kernels_of(hit.entry)
                except Exception as exc:  # noqa: BLE001 - whatever unpickling meets
                    lookup.reject(exc)
                    continue
                if misfit is not None:
                    lookup.rejected.append(misfit)
                    continue
                yield result, content, hit.tier == "local"
                if lookup.hit is not None:  # torch asks for another one
                    guards = cast("_Result", result).guards_expr or ""
                    lookup.rejected.append(partial(failing_guards, guards, lookup.inputs))
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.record_error(exc)
            self._warn(lookups, "a lookup failed, which is a miss", exc)

    def _accept(self, lookup: Lookup, hit: Hit, result: _Result) -> None:
        """Count a hit that was made into a callable."""
        assert lookup.entries is not None
        lookup.entries.accept(hit)
        lookup.saved_s = saved_s = sum(self._compile_ns(result)) / 1e9
        self._engine.count_time_saved(saved_s)
        where = f"{hit.tier}{self.label}"
        lookups.info("hit %s (%s), %.1f s of compiling saved", lookup.key, where, saved_s)

    def _ended(self, lookup: Lookup, event: dict[str, object], *, of_whole: bool = False) -> None:
        """Count and record how a lookup ended, if torch got as far as to ask for entries."""
        if lookup.entries is None:
            return
        outcome, key = lookup.entries.close(), str(lookup.key)
        if is_hit := isinstance(outcome, Hit):
            name, reason, self._has_hit = "hit", str(outcome.tier), True
        else:
            name, reason = "miss", str(outcome.reason)
            lookups.debug("miss %s (%s%s)", key, reason, self.label)
            if self.name == "aot" and self._has_hit and outcome.reason is Reason.ABSENT:
                _hint()
        event.update(key=key, outcome=name, reason=reason)
        if not self._engine.settings.record:
            return
        try:
            known = self._keys.known(key)
            components = known.components.items()
            record = Record(
                level=self.name,
                outcome=name,
                reason=reason,
                key=key,
                time=time.time(),
                elapsed_s=outcome.elapsed_s,
                saved_s=lookup.saved_s,
                where=users_line(),
                of_whole=of_whole,
                rejected=() if is_hit else tuple(map(_in_words, lookup.rejected[:_MAX_REJECTED])),
                components={part: (each.digest, each.value) for part, each in components},
                parts={} if is_hit else known.parts,
            )
            self._engine.record(record)
        except Exception as exc:  # noqa: BLE001 - no training run ends for a record
            self._warn(lookups, "a lookup is not recorded", exc)

    # -- saves

    def _run(self, saving: Save[_Result], save: Callable[[], None], *others: object) -> None:
        """Have torch save what is made portable before, ``others`` with it, unless that fails."""
        with self._state.entered(saving), contextlib.ExitStack() as stack:
            is_ready = not saving.is_shared
            if saving.is_shared:
                with self._refusing(saving):
                    self._prepare(saving)
                    results = *others, *self._graphs(saving.result)
                    share_sources = self._engine.settings.share_sources
                    stack.enter_context(portable(*results, share_sources=share_sources))
                    is_ready = True
            if is_ready:
                save()
            self._raise_if_strict(saving)

    def _write(self, original: Callable[[str, bytes], None], key: str, content: bytes) -> None:
        saving: Save[_Result] | None = self._current(Save)
        # Not in a save, this is torch.compiler.load_cache_artifacts.
        if saving is None or not (
            (saving.is_shared and self._share(saving, content)) or not saving.in_directory
        ):
            original(key, content)

    def _share(self, saving: Save[_Result], content: bytes) -> bool:
        """Save what torch has pickled; return whether it is shared."""
        key, is_saved = saving.key, False
        with self._refusing(saving):
            unpickled(content)  # as the next process will: it would refuse it every time
            with self._shown("s3cache.save") as event:
                frame = self._artifact(saving, content).encode(key)
                saved = self._engine.save(
                    key,
                    frame,
                    level=self.name,
                    provisional=self._is_provisional(),
                    remote=internals.tiers_asked(self.name).remote,
                )
                is_saved = isinstance(saved, Saved)
                event.update(key=key, bytes=len(frame), saved=is_saved)
            if isinstance(saved, Saved):
                saves.debug("saved %s (%d bytes%s)", key, len(frame), self.label)
                self._saved(saving, saved, len(frame))
        return is_saved

    def _artifact(self, saving: Save[_Result], content: bytes) -> Artifact:
        """Return what is saved of a compiled graph, which torch has pickled as ``content``."""
        graphs = self._graphs(saving.result)
        kernels = self._kernels.images_of(graphs)
        key = self._keys.known(saving.key)
        meta: dict[str, object] = {
            "guards": saving.result.guards_expr,
            "relies_on": saving.relies_on,
            "times_ns": list(self._compile_ns(saving.result)),
            "components": {
                name: [each.digest, each.value] for name, each in key.components.items()
            },
            "made_by": _made_by(graphs, compiled=bool(kernels)),
        }
        meta |= self._described(saving)
        return Artifact(self.name, content, kernels, meta, key.parts)

    @contextlib.contextmanager
    def _refusing(self, saving: CacheCall) -> Iterator[None]:
        """Leave what fails in the block unshared: the user's program goes on."""
        try:
            yield
        except CorruptError as exc:
            self._refused("entry", exc)
        except NotSharableError as exc:
            self._refused(exc.code, exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is
            saving.record_error(exc)
            self._warn(saves, "a compiled graph is not shared", exc)

    def _warn(self, logger: logging.Logger, what: str, error: Exception) -> None:
        """Warn once of each kind of failure; strict mode raises it instead."""
        if what not in self._warned and not self._engine.settings.strict:
            self._warned.add(what)
            logger.warning("%s %s", what, pointer(code_of(error)), exc_info=error)

    def _raise_if_strict(self, call: CacheCall) -> None:
        if call.error is not None and self._engine.settings.strict:
            raise call.error


# -- what is recorded of a lookup


@functools.cache
def _hint() -> None:
    """Point to ``explain`` once, for the first graph that is absent where others hit."""
    lookups.info("a graph missed where others hit; `s3cache explain` says why")


def _in_words(why: Callable[[], list[str]]) -> str:
    text = ""
    with contextlib.suppress(Exception):  # what an entry has guards on may not be here at all
        text = "; ".join(why())
    return text or "what it relies on does not hold"


_MAX_FRAMES = 1000
_NO_FILE = re.compile(r"<(?!stdin>|string>)")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def users_line() -> tuple[str, int, str] | None:
    """Return file, line and function of the first frame outside of torch that called the compiler.

    Users' backends are between our caller and Dynamo: frames that they called do not count.
    """
    compiler, torchs = _places()
    found = None
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        name = frame.f_code.co_filename
        if name.startswith(compiler):
            found = None
        elif found is None and not name.startswith(torchs) and not _NO_FILE.match(name):
            found = name, frame.f_lineno, frame.f_code.co_name
        if frame.f_back is None:
            break
        frame = frame.f_back
    return found


@functools.cache
def _places() -> tuple[str, tuple[str, ...]]:
    torch = internals.torch_directory()
    stdlib = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    # The frames of the standard library that may be in between.
    between = (stdlib + "contextlib.py", stdlib + "functools.py", stdlib + "threading.py")
    return os.path.join(torch, "_dynamo") + os.sep, (torch, _OURS, *between)


# -- what an entry says of itself, for people


def _made_by(graphs: Sequence[object], *, compiled: bool) -> dict[str, str]:
    """Return what made an entry, and for which devices; with the compiler if ``compiled``."""
    import torch

    devices = {str(device) for graph in graphs for device in getattr(graph, "device_types", ())}
    made_by = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "device": " ".join(sorted(devices)),
    }
    return {**made_by, "compiler": _compiler()} if compiled else made_by


@functools.cache
def _compiler() -> str:
    """Return the C++ compiler's name and version without its path; ``""`` if it has none."""
    try:
        # torch makes one line of what ``g++ -v`` prints, and has asked already.
        printed = internals.compiler_version.get()(internals.cpp_compiler.get()())
    except Exception:  # noqa: BLE001 - it has been used, and is gone
        return ""
    known = re.search(r"(?:\w+ )?(gcc|clang|icpx?) version [\w.+~-]+(?: \([^()/_]*\))?", printed)
    return known[0].strip("_") if known else ""
