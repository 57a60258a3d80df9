"""What the two levels of torch's caches share: whole graphs (AOT) and FX graphs.

A lookup goes through the entries under a key: each is unpickled, its guards are checked, and
torch's own code makes the one that fits into a callable. What torch compiles instead is saved: its
result, kernels and description become a frame. What cannot be shared goes to torch's directory, as
it would without s3cache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from s3cache.artifact import Artifact, UnreadableError, check_readable, unpickled
from s3cache.cache import CandidateLookup, Engine, Hit, Saved
from s3cache.errors import CorruptError, code_of
from s3cache.graph import Code
from s3cache.hooks._conditions import NotSharableError
from s3cache.hooks._kernels import Kernels
from s3cache.hooks._keys import KeyHook
from s3cache.hooks._portable import portable
from s3cache.hooks._recorder import Recorder, failing_guards
from s3cache.hooks._state import CacheCall, CompileState, Patches, PendingCompiles
from s3cache.stats import Level as LevelName
from s3cache.torch_api import Internal, internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from s3cache.hooks._distributed import RankConsensus

lookups, saves = logger_of("lookups"), logger_of("saves")

#: What torch goes through in a lookup: result, its pickle, whether it is of this machine.
Candidate: TypeAlias = tuple[object, bytes, bool]


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

    def offer(self, hit: Hit, result: object) -> None:
        """Make this entry the one that torch checks and rebuilds, with its kernels alone."""
        self.hit, self.result = hit, result
        self.kernels, self.modules = Artifact.kernels_of(hit.entry), {}

    def withdraw(self) -> None:
        """End what :meth:`offer` began."""
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
    _recorder: Recorder
    _warned: set[str] = field(default_factory=set, init=False)

    # -- what differs from level to level

    @abstractmethod
    def _type(self) -> type[_Result]:
        """Return the type of what torch compiles at this level."""

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

    def _artifact(self, saving: Save[_Result], content: bytes) -> Artifact:
        """Return what is saved of a compiled graph, which torch has pickled as ``content``."""
        graphs = self._graphs(saving.result)
        forward_ns, backward_ns = self._compile_ns(saving.result)
        kernels = self._kernels.images_of(graphs)
        key = self._keys.known(saving.key)
        return Artifact(
            kind=self.name,
            entry=content,
            kernels=kernels,
            guards=saving.result.guards_expr,
            relies_on=saving.relies_on,
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            components={name: [each.digest, each.value] for name, each in key.components.items()},
            parts=key.parts,
            made_by=_made_by(graphs, compiled=bool(kernels)),
        )

    def _prepare(self, saving: Save[_Result]) -> None:
        """Note with a result what its entry must have."""

    def _is_provisional(self) -> bool:
        """Return whether a better entry may soon replace one that is saved now."""
        return False

    def _saved(self, saving: Save[_Result], saved: Saved, size: int) -> None:
        """Act on an entry that was saved."""

    def install_shared(self, patches: Patches) -> None:
        """Replace what both levels have."""
        candidates, write, asks_remote, remote_cache, uses_torchs_remote = self.shared

        def ask_remote(original: Callable[[], bool]) -> bool:  # torch logs it, too
            ours = self._engine.has_remote and internals.tiers_asked(self.name).remote
            return original() or ours

        def only_if_asked(original: Callable[[], object]) -> object:  # torch's own
            return original() if uses_torchs_remote.get()() else None

        patches.wrap(candidates, self._candidates)
        patches.wrap(write, self._write)
        patches.wrap(asks_remote, ask_remote)
        patches.wrap(remote_cache, only_if_asked)

    # -- lookups

    def _current(self, kind: type[_Call]) -> _Call | None:
        """Return the current call of torch into this level, if it is of that kind."""
        call = self._state.current
        if isinstance(call, kind) and getattr(call, "level", None) == self.name:
            return call
        return None

    @contextlib.contextmanager
    def _looking_up(self, lookup: Lookup) -> Iterator[dict[str, object]]:
        """Make ``lookup`` the current call, and show it in torch's traces."""
        with self._state.entered(lookup), self._recorder.shown("s3cache.lookup") as event:
            yield event

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
                    if not isinstance(result, self._type()):
                        raise CorruptError("entry", f"holds a {type(result).__name__}")
                    misfit = self._misfit(result, lookup)
                    lookup.offer(hit, result)
                except Exception as exc:  # noqa: BLE001 - whatever unpickling meets
                    lookup.reject(exc)
                    continue
                if misfit is not None:
                    lookup.rejected.append(misfit)
                    continue
                yield result, content, hit.tier == "local"
                if lookup.hit is not None:  # torch asks for another one
                    lookup.rejected.append(
                        partial(failing_guards, result.guards_expr or "", lookup.inputs)
                    )
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
        saved_s, rejected = lookup.saved_s, lookup.rejected
        ending = self._recorder.ended(
            self.name, key, outcome, saved_s=saved_s, of_whole=of_whole, rejected=rejected
        )
        event.update(key=key, level=self.name, **ending)

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
            check_readable(content)
            with self._recorder.shown("s3cache.save") as event:
                frame = self._artifact(saving, content).encode(key)
                saved = self._engine.save(
                    key,
                    frame,
                    level=self.name,
                    provisional=self._is_provisional(),
                    remote=internals.tiers_asked(self.name).remote,
                )
                is_saved = isinstance(saved, Saved)
                event.update(key=key, level=self.name, bytes=len(frame), saved=is_saved)
            if isinstance(saved, Saved):
                saves.debug("saved %s (%d bytes%s)", key, len(frame), self.label)
                self._saved(saving, saved, len(frame))
        return is_saved

    @contextlib.contextmanager
    def _refusing(self, saving: CacheCall) -> Iterator[None]:
        """Leave what fails in the block unshared: the user's program goes on."""
        try:
            yield
        except UnreadableError as exc:
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
