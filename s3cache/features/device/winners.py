"""Seal entries: once torch has measured the kernels of a graph, keep the fastest configurations.

torch saves a graph before its kernels run, and measures a kernel with several configurations at its
first launch. Coordinate descent and combo kernels then search for more configurations. Such an
entry has every configuration, and each machine that hits it would measure again.

The process that saves such an entry watches it. Once the last kernel has been measured, the entry
is sealed: encoded again with the winners only, and saved in place of the first one, which is not
uploaded for a minute. torch remembers winners in files beside the kernels' sources. Entries contain
these too, for kernels that a hit loads from source. If C++ launches the kernels, the entry is
sealed after the first launch of the last one.

If that process ends early, the first machine that hits the entry after an hour seals it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache import frame
from s3cache.artifact import unpickle
from s3cache.cache import Engine
from s3cache.features.device import names
from s3cache.features.device.kernels import (
    compiled_later,
    files_of,
    is_combined,
    kernel_digest,
    kernel_name,
    kernel_sources,
    kernels_in,
    left_to_measure,
    ready_to_launch,
    remembered_winner,
    sealed_kernel,
    triton_files,
)
from s3cache.features.device.names import LEFT, REMEMBERED
from s3cache.frame import Frame
from s3cache.hooks import Kernels, Patches, graphs_of
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CachingAutotuner, CompiledGraph, TritonBundle

logger = logger_of("saves")

# For this long, only the process that saved an entry seals it.
_ABANDONED_S = 3600.0


@dataclass(eq=False)
class _Watched:
    """An entry with kernels that are left to measure, by the digest of their source."""

    entry: Frame
    tuners: dict[str, CachingAutotuner]
    launched: dict[str, set[str]]  # the files of all configurations
    by_cpp: dict[str, str]  # why C++ compiles or measures kernels, by digest of their source
    has_news: bool = False

    @property
    def is_whole(self) -> bool:
        return not (self.by_cpp or any(map(left_to_measure, self.tuners.values())))


class Winners:
    """Seals the entries of one session."""

    def __init__(self, engine: Engine, kernels: Kernels) -> None:
        self._engine, self._kernels = engine, kernels
        self._is_on = False
        self._watched: list[_Watched] = []
        self._first_launches = FirstLaunches()

    def install(self, patches: Patches) -> None:
        """Watch torch measure kernels from now on; without this, no entry is sealed."""
        for each in names.measure, names.descend, names.combine:
            if each.find() is not None:
                patches.wrap(each, partial(self._measure, each is names.measure))
        if names.first_launch.find() is not None:
            patches.wrap(names.first_launch, self._launch)
        patches.callback(self._engine.events.finishing.subscribe(self.seal))
        self._is_on = True

    # -- what a hit still measures, and what torch remembers

    def left(self, graphs: Iterable[CompiledGraph]) -> list[tuple[str, str]]:
        """Return the kernels that loaded graphs still compile or measure, with the reasons."""
        remaining: list[tuple[str, str]] = []
        for graph in graphs:
            remaining += left_by_cpp(graph).values()
            kernels = self._kernels_of(graph)
            remaining += [
                (name, why) for name, kernel in kernels if (why := left_to_measure(kernel))
            ]
        return remaining

    def remember(self, graph: CompiledGraph) -> None:
        """Add to a graph that will be pickled which winners torch remembers."""
        _remember(graph, self._tuners_of([graph]))
        self._first_launches.add_to(graph)

    def _kernels_of(self, graph: CompiledGraph) -> Iterator[tuple[str, object]]:
        module = self._kernels.module_of(graph) if self._is_on else None
        return iter(()) if module is None else kernels_in(module)

    def _tuners_of(self, graphs: Iterable[CompiledGraph]) -> dict[str, CachingAutotuner]:
        kernels = (kernel for graph in graphs for _, kernel in self._kernels_of(graph))
        tuners = [each for each in kernels if isinstance(each, names.autotuner.get())]
        return {each.kernel_hash: each for each in tuners}

    # -- while the program runs

    def watch(self, entry: Frame, graphs: Sequence[CompiledGraph], *, is_ours: bool = True) -> None:
        """Seal ``entry`` once all kernels of its graphs, which are loaded, have been measured."""
        if not is_ours:
            age_s = time.time() - entry.header.created_ns / 1e9
            if age_s < _ABANDONED_S or not self._engine.may_resign:
                return
        tuners = self._tuners_of(graphs)
        launched = {digest: files_of(tuner) for digest, tuner in tuners.items()}
        by_cpp = [left_by_cpp(graph).items() for graph in graphs]
        reasons = {digest: why for found in by_cpp for digest, (_, why) in found}
        watched = _Watched(entry, tuners, launched, reasons)
        if not watched.is_whole:  # otherwise measuring will not change what is left
            self._watched.append(watched)

    def _measure(
        self,
        is_first: bool,
        original: Function[object],
        tuner: CachingAutotuner,
        *args: object,
        **kwargs: object,
    ) -> object:
        winner = original(tuner, *args, **kwargs)
        with self._harmless():
            if not is_first:  # torch does the same next
                tuner.launchers = [winner]
            if not left_to_measure(tuner):  # no further search follows
                for watched in self._watched:
                    watched.has_news |= watched.tuners.get(tuner.kernel_hash) is tuner
                self.seal(is_partial=False)
        return winner

    def _launch(
        self,
        original: Function[object],
        pending: dict[str, object],
        name: str,
        *args: object,
        **kwargs: object,
    ) -> object:
        kernel = ready_to_launch(pending, name)
        directories, left = files_of(kernel), left_to_measure(kernel)
        result = original(pending, name, *args, **kwargs)
        with self._harmless():
            left = self._first_launches.note(kernel, directories, left)
            for watched in self._watched:
                watched.has_news |= watched.by_cpp.pop(kernel.kernel_hash, left) != left
            self.seal(is_partial=False)
        return result

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Leave entries as they are if the block fails; in strict mode, raise the error."""
        try:
            yield
        except Exception as exc:
            if self._engine.settings.strict:
                raise
            logger.warning("an entry keeps kernels that were measured: %s", exc, exc_info=True)

    def seal(self, *, is_partial: bool = True) -> None:
        """Seal entries with no kernel left; if ``is_partial``, others with what was measured."""
        for watched in [entry for entry in self._watched if entry.has_news]:
            with self._harmless():
                if not (watched.is_whole or is_partial):
                    continue
                watched.has_news = False
                if watched.is_whole:
                    self._watched = [entry for entry in self._watched if entry is not watched]
                self._seal(watched)

    def _seal(self, watched: _Watched) -> None:
        entry, header = watched.entry, watched.entry.header
        result = unpickle(bytes(entry.section("entry")))
        reasons: dict[str, str] = {}
        for graph in graphs_of(result):
            digests = [kernel_digest(text) for _, text in kernel_sources(graph.source_code)]
            tuners = {each: watched.tuners[each] for each in digests if each in watched.tuners}
            _remember(graph, tuners)
            before = left_by_cpp(graph)
            self._first_launches.add_to(graph)
            reasons |= {name: "" for name, _ in before.values()}
            reasons |= dict(left_by_cpp(graph).values())
            bundle: TritonBundle | None = getattr(graph, internals.TRITON_BUNDLE, None)
            if bundle is None:
                continue
            settled = _settled(bundle, tuners, getattr(graph, REMEMBERED, {}))
            for digest, tuner in tuners.items():
                why = left_to_measure(tuner) or "torch does not remember the winner"
                reasons[kernel_name(tuner)] = "" if digest in settled else why
            sealed = _sealed(bundle, settled, {each: watched.launched[each] for each in tuners})
            setattr(graph, internals.TRITON_BUNDLE, self._kernels.portable(sealed))
        content = pickle.dumps(result)
        unpickle(content)  # as the next process will
        left = [
            [name, reasons.get(name, why)]
            for name, why in cast("list[tuple[str, str]]", header.meta.get(LEFT) or [])
            if reasons.get(name, why)
        ]
        data = frame.encode(
            kind=header.kind,
            key=header.key,
            variant=header.variant,
            schema=header.schema,
            sections={name: entry.section(name) for name in entry.names} | {"entry": content},
            meta={**header.meta, LEFT: left},
        )
        self._engine.replace(entry, data)
        watched.entry = frame.decode(data)
        logger.debug("sealed %s (%d bytes, %d before)", header.key, len(data), entry.size)


def _remember(graph: CompiledGraph, tuners: Mapping[str, CachingAutotuner]) -> None:
    winners = dict(getattr(graph, REMEMBERED, {}))
    for digest, tuner in tuners.items():
        if not left_to_measure(tuner) and (best := remembered_winner(tuner)):
            winners[digest] = best
    if winners:
        setattr(graph, REMEMBERED, winners)


def _settled(
    bundle: TritonBundle, tuners: Mapping[str, CachingAutotuner], remembered: Container[str]
) -> dict[str, CachingAutotuner]:
    """Return the kernels with a winner that a hit launches without measuring.

    If the bundle has only the files of a kernel, a hit loads the kernel from source, and torch must
    remember the winner. It does not remember those that were searched for in parts.
    """
    static = {each.kernel.kernel_hash for each in bundle.static_autotuners}
    return {
        digest: tuner
        for digest, tuner in tuners.items()
        if not left_to_measure(tuner)
        and (digest in static or (digest in remembered and not is_combined(tuner)))
    }


def _sealed(
    bundle: TritonBundle,
    settled: Mapping[str, CachingAutotuner],
    launched: Mapping[str, set[str]],
) -> TritonBundle:
    """Return the bundle of a graph without the configurations that have lost."""
    files = {each.kernel_hash: each for each in bundle.kernel_artifacts}
    winners = {each.launchers[0].cache_hash for each in settled.values()}
    needed = {name for digest in launched.keys() - settled.keys() for name in launched[digest]}
    lost = {name for digest in settled for name in launched[digest]} - winners - needed
    for tuner in settled.values():
        if (found_later := tuner.launchers[0].cache_hash) not in files:
            files[found_later] = triton_files(found_later, int(tuner.triton_meta["device"]))
    return dataclasses.replace(
        bundle,
        kernel_artifacts=[each for name, each in files.items() if name not in lost],
        static_autotuners=[
            dataclasses.replace(autotuner, kernel=sealed_kernel(autotuner.kernel, tuner))
            if (tuner := settled.get(autotuner.kernel.kernel_hash)) is not None
            else autotuner
            for autotuner in bundle.static_autotuners
        ],
    )


# -- kernels that generated C++ launches
#
# torch's bundle of a graph has none of them, so they are added to the entry: their files, and the
# winner that torch remembers. If a hit must measure a kernel again, the entry has the files of all
# its configurations.

_NOT_LAUNCHED = "compiled when it is launched (cpp_wrapper)"


@dataclass(frozen=True)
class _Launch:
    device: int
    directories: set[str]  # those with files that a hit launches
    lost: set[str]  # the other ones
    known: dict[str, object]  # the winner, if there was a choice; or why a hit measures, as LEFT


class FirstLaunches:
    """The kernels that C++ has launched in this process, by the digest of their source."""

    def __init__(self) -> None:
        self._launches: dict[str, _Launch] = {}

    def note(self, kernel: CachingAutotuner, directories: set[str], left: str) -> str:
        """Note a kernel that was launched; return why a hit compiles or measures it again.

        Args:
            directories: names of the directories with all its configurations, before the launch.
            left: why the launch measured the kernel, if it did.
        """
        options = internals.inductor_config.get().aot_inductor
        if options.emit_multi_arch_kernel or options.package_cpp_only:
            return _NOT_LAUNCHED  # C++ needs the assembly of its kernels, which no entry has
        winner, files = remembered_winner(kernel) or {}, {kernel.launchers[0].cache_hash}
        # torch remembers only the blocks of one part of a combo kernel.
        if left and (is_combined(kernel) or left_to_measure(kernel) or not winner):
            winner, files = {LEFT: left}, files | directories
        self._launches[kernel.kernel_hash] = _Launch(
            int(kernel.triton_meta["device"]), files, directories - files, winner
        )
        return left if LEFT in winner else ""

    def add_to(self, graph: CompiledGraph) -> None:
        """Add the files and winners of launched kernels to a graph that will be pickled."""
        launches = {
            digest: launch
            for digest in compiled_later(graph.source_code)
            if (launch := self._launches.get(digest)) is not None
        }
        bundle: TritonBundle | None = getattr(graph, internals.TRITON_BUNDLE, None)
        if not launches or bundle is None:
            return
        lost = {name for launch in launches.values() for name in launch.lost}
        files = {each.kernel_hash: each for each in bundle.kernel_artifacts}
        files = {name: each for name, each in files.items() if name not in lost}
        for launch in launches.values():
            for name in launch.directories - files.keys():
                files[name] = triton_files(name, launch.device)
        bundle = dataclasses.replace(bundle, kernel_artifacts=[*files.values()])
        setattr(graph, internals.TRITON_BUNDLE, bundle)
        known = {digest: launch.known for digest, launch in launches.items()}
        setattr(graph, REMEMBERED, {**getattr(graph, REMEMBERED, {}), **known})


def left_by_cpp(graph: CompiledGraph) -> dict[str, tuple[str, str]]:
    """Return the kernels that C++ compiles or measures on a hit: name and reason, by digest."""
    remembered = getattr(graph, REMEMBERED, {})
    remaining = {}
    for digest, name in compiled_later(graph.source_code).items():
        if why := remembered.get(digest, {LEFT: _NOT_LAUNCHED}).get(LEFT, ""):
            remaining[digest] = (name, why)
    return remaining
