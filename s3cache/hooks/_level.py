"""One level of torch's caches, and what both have in common: the AOT level and the FX level.

A lookup goes through the entries under a key: each is unpickled, its guards are checked, and the
one that fits is made into a callable by torch's own code (``_aot_graphs``, ``_fx_graphs``). What
torch compiles instead is saved: its result, its kernels and its description become a frame. What
cannot be shared goes to torch's directory, as it would without s3cache.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeAlias, TypeVar, cast

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.artifact import Artifact, UnreadableError, check_readable, unpickled
from s3cache.cache import Engine, Hit, JudgedLookup, Saved
from s3cache.errors import CorruptError
from s3cache.graph import Code, Component
from s3cache.hooks._conditions import failing_guards
from s3cache.hooks._first_calls import UndescribedError
from s3cache.hooks._kernels import Kernels, UnsharableKernelError
from s3cache.hooks._keys import KeySeam
from s3cache.hooks._patching import Patches
from s3cache.hooks._portable import portable, without_sources
from s3cache.hooks._records import Bypasses, LookupLog, in_words
from s3cache.hooks._state import CacheCall, CompileState, PendingCompiles
from s3cache.stats import Level as LevelName
from s3cache.torch_api import Internal, internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Function

__all__ = ["Candidate", "Level", "Lookup", "Save", "Shared", "saves"]

lookups, saves = logger_of("lookups"), logger_of("saves")

#: What torch goes through in a lookup: result, its pickle, whether it is of this machine.
Candidate: TypeAlias = tuple[object, bytes, bool]
_Result = TypeVar("_Result")
_Call = TypeVar("_Call", bound=CacheCall)


class Lookup(CacheCall):
    """One lookup of torch's.

    Attributes:
        level: the level that is asked.
        entries: the entries under its key, once torch asks for them.
        candidate: the one that torch checks or rebuilds now, and where it came from. The first is
            ``None`` while it is unpickled.
        saved_s: of a hit, what making it took where it was made.
        rejected: of entries under its key, what says why they do not fit.
    """

    def __init__(self, level: LevelName) -> None:
        super().__init__()
        self.level = level
        self.entries: JudgedLookup | None = None
        self.candidate: tuple[object, Hit] | None = None
        self.saved_s = 0.0
        self.rejected: list[Callable[[], list[str]]] = []

    def reject(self, error: Exception) -> None:
        """Set the candidate aside, which cannot be used."""
        assert self.entries is not None
        assert self.candidate is not None
        self.met(error)
        self.rejected.append(lambda: [f"cannot be used: {error}"])
        self.entries.reject(self.candidate[1], error)
        self.candidate = None


class Save(CacheCall, Generic[_Result]):
    """One save of torch's.

    Attributes:
        level: the level that it is for.
        result: what torch has compiled.
        is_shared: whether it is ours; what torch keeps to itself stays as torch made it.
        in_directory: whether torch keeps in its directory what cannot be shared.
        relies_on: see :class:`Artifact`.
    """

    def __init__(
        self,
        level: LevelName,
        key: str,
        result: _Result,
        *,
        is_shared: bool,
        in_directory: bool = True,
    ) -> None:
        super().__init__()
        self.key = key
        self.level = level
        self.result = result
        self.is_shared = is_shared
        self.in_directory = in_directory
        self.relies_on: str | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """What both levels of a session share."""

    engine: Engine
    state: CompileState
    keys: KeySeam
    kernels: Kernels
    compiles: PendingCompiles
    bypasses: Bypasses
    log: LookupLog


class Level(ABC, Generic[_Result]):
    """Puts a cache before torch's own directory of entries.

    Attributes:
        name: what statistics and records call it.
        label: what logs call it.
    """

    name: ClassVar[LevelName]
    label: ClassVar[str] = ""

    def __init__(self, shared: Shared) -> None:
        self._engine = shared.engine
        self._state = shared.state
        self._keys = shared.keys
        self._kernels = shared.kernels
        self._compiles = shared.compiles
        self._bypasses = shared.bypasses
        self._log = shared.log
        self._warned: set[str] = set()

    # -- what an adapter says of its level

    @abstractmethod
    def install(self, patches: Patches) -> None:
        """Replace the functions of torch's that look up, rebuild and save."""

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
    def _guards(self, result: _Result) -> str | None:
        """Return torch's guards on sizes of inputs."""

    @abstractmethod
    def _refused(self, code: Code, error: Exception) -> None:
        """Count and log something that was compiled and cannot be shared."""

    def _misfit(self, result: _Result, lookup: Lookup) -> Callable[[], list[str]] | None:
        """Return what says why ``result`` does not fit, beside torch's guards; ``None`` if it does.

        Raises:
            CorruptError: it cannot be used anywhere.
        """

    def _artifact(self, saving: Save[_Result], content: bytes) -> Artifact:
        """Return what is saved of a compiled graph, of which torch has made ``content``."""
        graphs, key = self._graphs(saving.result), str(saving.key)
        forward_ns, backward_ns = self._compile_ns(saving.result)
        kernels = self._kernels.images_of(graphs)
        return Artifact(
            kind=self.name,
            entry=content,
            kernels=kernels,
            guards=self._guards(saving.result),
            relies_on=saving.relies_on,
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            components=_components_as_json(self._keys.components(key)),
            parts=self._keys.known(key).parts,
            made_by=_maker(graphs, compiled=bool(kernels)),
        )

    def _is_provisional(self) -> bool:
        """Return whether a better entry may soon make one that is saved now needless."""
        return False

    def _saved(self, saving: Save[_Result], saved: Saved, size: int) -> None:
        """Do what is left to do once an entry was saved."""

    # -- installing

    def _install(
        self,
        patches: Patches,
        *,
        candidates: Internal[Function[Iterator[Candidate]]],
        write: Internal[Callable[[str, bytes], None]],
        asks_remote: Internal[Callable[[], bool]],
        remote_cache: Internal[Callable[[], object]],
        uses_torchs_remote: Internal[Callable[[], bool]],
    ) -> None:
        """Replace what both levels have, where this one has it."""
        patches.replace(candidates, self._candidates)
        patches.replace(write, self._writer)
        patches.replace(asks_remote, self._remote_asker)
        patches.replace(remote_cache, partial(_only_if_asked, uses_torchs_remote))

    def _remote_asker(self, original: Callable[[], bool]) -> Callable[[], bool]:
        """Have torch know, and log, that a remote cache is asked where that is ours."""

        def should_use_remote_cache() -> bool:
            ours = self._engine.has_remote and internals.tiers_asked(self.name).remote
            return original() or ours

        return should_use_remote_cache

    # -- lookups

    def _current(self, kind: type[_Call]) -> _Call | None:
        """Return the call of torch into this level that is under way, if it is of that kind."""
        call = self._state.current
        if isinstance(call, kind) and getattr(call, "level", None) == self.name:
            return call
        return None

    def _candidates(self, original: Function[Iterator[Candidate]]) -> Function[Iterator[Candidate]]:
        def iterate_over_candidates(
            cls: type, *args: object, **kwargs: object
        ) -> Iterator[Candidate]:
            lookup = self._current(Lookup)
            if lookup is not None:
                if self._keys.is_shared(lookup.key):
                    yield from self._entries(lookup)
                lookup.candidate = None
            if self._engine.uses_trusted_only:
                return  # torch's own are not signed
            for candidate in original(cls, *args, **kwargs):
                if lookup is None or self._misfit(cast("_Result", candidate[0]), lookup) is None:
                    yield candidate

        return iterate_over_candidates

    def _entries(self, lookup: Lookup) -> Iterator[Candidate]:
        try:
            asked = internals.tiers_asked(self.name)
            lookup.entries = self._engine.judged(str(lookup.key), self.name, **asked._asdict())
            for hit in lookup.entries:
                lookup.candidate = None, hit
                try:
                    content = bytes(Artifact.entry_of(hit.entry, self.name))
                    result = unpickled(content)
                    if not isinstance(result, self._type()):
                        raise CorruptError("entry", f"holds a {type(result).__name__}")
                    misfit = self._misfit(result, lookup)
                except Exception as exc:  # noqa: BLE001 - whatever unpickling meets
                    lookup.reject(exc)
                    continue
                if misfit is not None:
                    lookup.rejected.append(misfit)
                    continue
                lookup.candidate = result, hit
                yield result, content, hit.tier == "local"
                if lookup.candidate is not None:  # torch asks for another one
                    guards = self._guards(result) or ""
                    lookup.rejected.append(partial(failing_guards, guards, lookup.inputs))
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.met(exc)
            self._warn(lookups, "a lookup failed, which is a miss", exc)

    def _hit_of(self, result: object, lookup: Lookup | None) -> Hit | None:
        """Return the entry that ``result`` was unpickled from, if it was one of ours."""
        candidate = None if lookup is None else lookup.candidate
        return None if candidate is None or candidate[0] is not result else candidate[1]

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
        event.update(in_words(outcome), key=key, level=self.name)
        self._log.ended(
            self.name,
            key,
            outcome,
            saved_s=lookup.saved_s,
            of_whole=of_whole,
            rejected=lookup.rejected,
        )

    # -- saves

    def _made_portable(
        self, saving: Save[_Result], *others: object
    ) -> contextlib.AbstractContextManager[object] | None:
        """Return a context in which torch pickles nothing of this machine; ``None`` if that fails.

        Args:
            others: what else of the result may say where its code is from.
        """
        try:
            with contextlib.ExitStack() as stack:
                graphs = self._graphs(saving.result)
                shares_sources = self._engine.settings.share_sources
                if with_triton := internals.with_triton_kernels(graphs):
                    stack.enter_context(portable(with_triton, share_sources=shares_sources))
                if not shares_sources:
                    stack.enter_context(without_sources(*others, *graphs))
                return stack.pop_all()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._failed(saving, exc)
            return None

    def _writer(self, original: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def write_to_local_cache(key: str, content: bytes) -> None:
            saving: Save[_Result] | None = self._current(Save)
            # Not in a save, this is torch.compiler.load_cache_artifacts.
            if saving is None or not (
                (saving.is_shared and self._share(saving, content)) or not saving.in_directory
            ):
                original(key, content)

        return write_to_local_cache

    def _share(self, saving: Save[_Result], content: bytes) -> bool:
        """Save what torch has pickled; return whether it is shared."""
        key = str(saving.key)
        try:
            check_readable(content)
            with self._log.shown("s3cache.save") as event:
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
        except UnreadableError as exc:
            self._refused("entry", exc)
        except UnsharableKernelError as exc:
            self._refused("kernel", exc)
        except UndescribedError as exc:
            self._refused("fakify-first-call", exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._failed(saving, exc)
        return False

    def _failed(self, saving: CacheCall, error: Exception) -> None:
        saving.met(error)
        self._warn(saves, "a compiled graph is not shared", error)

    def _warn(self, logger: logging.Logger, what: str, error: Exception) -> None:
        """Warn once of each kind of failure; strict mode raises it instead."""
        if what not in self._warned and not self._engine.settings.strict:
            self._warned.add(what)
            logger.warning("%s %s", what, pointer(code_of(error)), exc_info=error)

    def _raise_if_strict(self, call: CacheCall) -> None:
        if call.error is not None and self._engine.settings.strict:
            raise call.error


def _only_if_asked(
    asked: Internal[Callable[[], bool]], original: Callable[[], object]
) -> Callable[[], object]:
    """Have torch's own remote cache asked only where its option is set, as without s3cache."""

    def get_remote_cache() -> object:
        return original() if asked.get()() else None

    return get_remote_cache


# -- what an entry says of itself, for people


def _components_as_json(components: Mapping[str, Component]) -> dict[str, list[str]]:
    """Return the components of a key as plain data: name to digest and value."""
    return {name: [component.digest, component.value] for name, component in components.items()}


def _maker(graphs: Sequence[object], *, compiled: bool) -> dict[str, str]:
    """Return what makes an entry, and for which devices; with the compiler, if ``compiled``."""
    import torch

    made_by = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "device": " ".join(sorted(_devices(graphs))),
    }
    return {**made_by, "compiler": _compiler()} if compiled else made_by


def _devices(graphs: Iterable[object]) -> set[str]:
    return {str(each) for graph in graphs for each in getattr(graph, "device_types", ())}


@functools.cache
def _compiler() -> str:
    """Return the C++ compiler's name and version, without its path; ``""`` if it does not say."""
    try:
        # torch makes one line of what ``g++ -v`` prints, and has asked already.
        said = internals.compiler_version.get()(internals.cpp_compiler.get()())
    except Exception:  # noqa: BLE001 - it has been used, and is gone
        return ""
    known = re.search(r"(?:\w+ )?(gcc|clang|icpx?) version [\w.+~-]+(?: \([^()/_]*\))?", said)
    return known[0].strip("_") if known else ""
