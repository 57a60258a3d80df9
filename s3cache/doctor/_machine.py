"""This machine: the local directory and its disk, and what runs what is loaded."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator

from s3cache._problems import code_of
from s3cache._words import counted
from s3cache.doctor._check import Check, fault, ok, skipped, warning
from s3cache.errors import ConfigError, StoreError, TransientError
from s3cache.settings import Settings
from s3cache.store import Patience
from s3cache.tier import PatientDiskTier

__all__ = ["check_cpu", "check_disk", "check_execution", "check_local_dir"]

_LITTLE_BYTES = 1 << 30
_FEW_INODES = 10_000

_Statvfs = Callable[[str], os.statvfs_result]


def check_local_dir(settings: Settings) -> Iterator[Check]:
    """Can it be used, is it ours alone, and is there room? Waits some seconds at most."""
    if not settings.local:
        yield skipped("local directory", "there is no local tier: local=false")
        return
    path = settings.local_dir
    try:
        tier = PatientDiskTier(
            path, max_bytes=settings.local_max_bytes, max_files=settings.local_max_files
        )
    except ConfigError as exc:
        yield fault("local directory", f"{exc.thing} {exc.cause}", exc.fix, "ConfigError")
        return
    except TransientError as exc:
        fix = "set local_dir to a disk that works"
        yield fault("local directory", f"{path} hangs: {exc}", fix, "unavailable")
        return
    except StoreError as exc:
        yield _unusable(exc)
        return
    try:
        used = tier.usage()
        size = f"{counted(used.files, 'file')}, {counted(used.bytes, 'byte')}"
        yield ok("local directory", f"{path}: {size}")
    except StoreError as exc:
        yield _unusable(exc)
        return
    finally:
        tier.close()
    yield from check_disk(path, settings.local_max_bytes)


def _unusable(error: StoreError) -> Check:
    fix = "set local_dir to a directory that you can write"
    return fault("local directory", str(error), fix, code_of(error))


def check_disk(path: str, max_bytes: int, statvfs: _Statvfs = os.statvfs) -> Iterator[Check]:
    """Space and inodes where the local tier is."""
    try:
        about = _about(path, statvfs)
    except (OSError, StoreError) as exc:
        fix = "set local_dir to a disk that works"
        yield fault("disk", f"{path}: {exc}", fix, "unavailable")
        return
    free = about.f_bavail * about.f_frsize
    if free < min(_LITTLE_BYTES, max_bytes):
        problem = f"{free >> 20} MiB are free at {path}"
        yield warning("space", problem, "make room, or set local_max_bytes", "full")
    else:
        yield ok("space", f"{free >> 30} GiB are free")
    if about.f_files and about.f_favail < _FEW_INODES:  # some file systems count none
        problem = f"{about.f_favail} are free at {path}"
        yield warning("inodes", problem, "remove files, or set local_max_files", "full")
    else:
        yield ok("inodes", "there are enough")


def _about(path: str, statvfs: _Statvfs) -> os.statvfs_result:
    """What the file system of ``path`` says of itself, if it does in time."""
    patience = Patience.of(path)
    try:
        return patience.call(lambda: statvfs(path))
    finally:
        patience.release()


def check_execution(
    statvfs: _Statvfs = os.statvfs, sysctl: str = "/proc/sys/vm/memfd_noexec"
) -> Iterator[Check]:
    """Whether code may be loaded: from memory, as a hit does, and from where torch compiles it."""
    try:
        with open(sysctl, encoding="ascii") as file:
            refused = file.read().strip() == "2"
    except OSError:  # of Linux 6.3
        refused = False
    if refused:
        yield fault(
            "execution",
            "the system loads no code from memory (vm.memfd_noexec=2), which hits need",
            "sysctl vm.memfd_noexec=1",
            "machine",
        )
    else:
        yield ok("execution", "code may be loaded from memory")
    path = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    place = path if os.path.isdir(path) else os.path.dirname(path) or "/"
    try:
        about = _about(place, statvfs)
    except (OSError, StoreError) as exc:
        fix = "set TORCHINDUCTOR_CACHE_DIR"
        yield fault("torch's directory", f"{place}: {exc}", fix, "machine")
        return
    if about.f_flag & os.ST_NOEXEC:
        yield fault(
            "torch's directory",
            f"{place} is mounted noexec: what torch compiles there cannot be loaded",
            "set TORCHINDUCTOR_CACHE_DIR to another disk",
            "machine",
        )


def check_cpu(cpuinfo: str = "/proc/cpuinfo") -> Iterator[Check]:
    """Which instruction sets there are: code for the CPU is shared by machines with the same."""
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as file:
            flags = re.search(r"^(?:flags|Features)\s*:(.*)$", file.read(), re.MULTILINE)
    except OSError:
        flags = None
    known = {} if flags is None else dict.fromkeys(flags[1].split())
    best = [name for name in ("amx_int8", "avx512f", "avx2", "sve", "asimd") if name in known]
    arch = platform.machine()
    if best or flags is None:
        yield ok("CPU", f"{arch} {' '.join(best)}".strip())
    else:
        yield warning(
            "CPU",
            f"{arch} without vector instructions that torch compiles for",
            "entries of machines with AVX2 or more are misses here, and theirs of yours",
        )
