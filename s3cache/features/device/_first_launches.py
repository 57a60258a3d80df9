"""Kernels that generated C++ compiles through torch at their first launch (``cpp_wrapper``).

torch's bundle of a graph has none of these kernels, so they are added to the entry: their files,
and the winner that torch remembers. If a hit must measure a kernel again, the entry has the files
of all its configurations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3cache.features.device._kernels import (
    compiled_later,
    device_of,
    is_combined,
    left_to_measure,
    needs_assembly,
    remembered_winner,
    triton_files,
)
from s3cache.features.device._marks import LEFT, REMEMBERED
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CachingAutotuner, CompiledGraph, TritonBundle

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
        if needs_assembly():
            return _NOT_LAUNCHED
        known, files = remembered_winner(kernel) or {}, {kernel.launchers[0].cache_hash}
        # torch remembers only the blocks of one part of a combo kernel.
        if left and (is_combined(kernel) or left_to_measure(kernel) or not known):
            known, files = {LEFT: left}, files | directories
        self._launches[kernel.kernel_hash] = _Launch(
            device_of(kernel), files, directories - files, known
        )
        return left if LEFT in known else ""

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
    known = getattr(graph, REMEMBERED, {})
    found = {}
    for digest, name in compiled_later(graph.source_code).items():
        if why := known.get(digest, {LEFT: _NOT_LAUNCHED}).get(LEFT, ""):
            found[digest] = (name, why)
    return found
