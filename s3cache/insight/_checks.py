"""Check this machine: its settings, trust, disk and processor, torch and the C++ compiler."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    S3CacheError,
    StoreError,
    TransientError,
    UntrustedError,
    code_of,
)
from s3cache.manage import trust_of
from s3cache.settings import Settings, unknown_variables
from s3cache.store import parse_url
from s3cache.tier import DiskTier
from s3cache.trust import pack, sign, signing_key_of
from s3cache.util.deadline import DeadlineExecutor
from s3cache.util.text import counted

#: A ``fault`` keeps the cache from doing its work, a ``warning`` does not.
Verdict: TypeAlias = Literal["ok", "warning", "fault", "skipped"]

#: The names of the checks; ``docs/doctor.md`` has a section on each.
Name: TypeAlias = Literal[
    "settings", "mode", "remote", "credentials", "list", "get", "put", "conditional-put",
    "read-back", "clock", "latency", "delete", "local-directory", "disk", "space", "inodes",
    "execution", "torch-directory", "torch", "compiler", "cpu", "trust", "signing",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked; ``s3cache explain`` takes it.
        found: the problem, or that there is none.
        fix: what to do about a warning or a fault.
        code: what ``s3cache explain`` says more of, beside the check itself, if anything.
    """

    name: Name
    verdict: Verdict
    found: str
    fix: str = ""
    code: str = ""

    @property
    def codes(self) -> tuple[str, ...]:
        """Return the codes to read on about; none where all is well."""
        if self.verdict in ("ok", "skipped"):
            return ()
        return (self.name, self.code) if self.code else (self.name,)


def failed(name: Name, error: S3CacheError, fix: str = "") -> Check:
    """Return the fault that an error is, with a fix for errors of its kind unless one is given."""
    found = str(error)
    if isinstance(error, ConfigError):
        found, fix = f"{error.thing} {error.cause}", error.fix
    elif isinstance(error, AccessDeniedError):
        fix = fix or "grant what infra/aws/s3cache-policy.json has; check the credentials"
    elif isinstance(error, MissingContainerError):
        fix = fix or "make the bucket or directory, or mend the URL"
    elif isinstance(error, TransientError):
        fix = fix or "check the endpoint, the proxy and the network"
    return Check(name, "fault", found, fix or "see docs/configuration.md", code_of(error))


# -- settings, and which entries they trust


def check_settings(settings: Settings, url: str | None) -> Iterator[Check]:
    """Check where each setting came from, and for variables that nothing reads.

    Args:
        url: the one that was given as an argument, if any.
    """
    origins = []
    for field in fields(Settings):
        variable = f"S3CACHE_{field.name.upper()}"
        is_argument = field.name == "url" and url is not None
        if is_argument or os.environ.get(variable):
            # Neither keys nor what may contain one are shown.
            is_secret = not field.repr or field.name in ("url", "trusted_keys")
            value = "" if is_secret else f"={getattr(settings, field.name)}"
            origins.append(f"{field.name}{value} from {'--url' if is_argument else variable}")
    yield Check("settings", "ok", "; ".join([*origins, "all others are defaults"]))
    for variable, hint in unknown_variables():
        problem = f"environment variable {variable} is not known"
        yield Check("settings", "warning", problem, hint)
    if settings.mode == "off":
        problem = "is off: nothing is looked up or saved"
        yield Check("mode", "warning", problem, "set mode=read-write", "disabled")
    if settings.url is None:
        problem = "there is none: nothing is shared with other machines"
        yield Check("remote", "warning", problem, "set S3CACHE_URL")
        return
    try:
        location = parse_url(settings.url)
    except ConfigError as exc:
        yield failed("remote", exc)
        return
    yield Check("remote", "ok", location.identity.partition("?")[0])


def check_trust(settings: Settings) -> Iterator[Check]:
    """Check which signers are trusted, and whether readers with the same keys use our entries."""
    try:
        policy = trust_of(settings)
        named = settings.signing_key or ""
        signer = signing_key_of(named) if isinstance(named, str) else None
    except ConfigError as exc:
        yield failed("trust", exc)
        return
    if policy.level == "off":
        problem = (
            "no key is trusted: anyone who can write to the bucket decides what its readers run"
        )
        yield Check("trust", "warning", problem, "s3cache keygen NAME, and docs/trust.md")
    else:
        names = ", ".join(f"{each.key.name} for {each.audience}" for each in policy.trusted)
        yield Check("trust", "ok", f"{policy.level}: {names}")
    audience = settings.audience
    if signer is None:
        if policy.level == "require" and settings.mode in ("read-write", "write-only"):
            problem = "what is saved here is not signed: readers with the same keys do not use it"
            fix = "set signing_key, or mode=read-only"
            yield Check("signing", "warning", problem, fix, "untrusted")
        return
    digest = bytes(32)
    signature = sign(digest, signer, audience=audience, issued_s=int(time.time()), ttl_s=0)
    try:
        policy.check(digest, pack([signature]))
    except UntrustedError as exc:
        problem = f"what key {signer.name} signs for {audience} here is a miss here: {exc}"
        fix = f"add to trusted_keys: {audience}={signer.name}:..., as keygen printed it"
        yield Check("signing", "fault", problem, fix, "untrusted")
    else:
        yield Check("signing", "ok", f"key {signer.name} for {audience}")


# -- the local directory, and where code is loaded from


_LITTLE_BYTES = 1 << 30
_FEW_INODES = 10_000
_WORKING_DISK = "set local_dir to a disk that works"

_Statvfs: TypeAlias = Callable[[str], os.statvfs_result]


def check_local_dir(settings: Settings) -> Iterator[Check]:
    """Check that it can be used, is private, and has room. Waits some seconds at most."""
    if not settings.local:
        yield Check("local-directory", "skipped", "there is no local tier: local=false")
        return
    path = settings.local_dir
    try:
        tier = DiskTier(
            path, max_bytes=settings.local_max_bytes, max_files=settings.local_max_files
        )
        with contextlib.closing(tier):
            used = tier.usage()
    except S3CacheError as exc:
        is_slow = isinstance(exc, TransientError)
        fix = _WORKING_DISK if is_slow else "set local_dir to a directory that you can write"
        yield failed("local-directory", exc, fix)
        return
    size = f"{counted(used.files, 'file')}, {counted(used.bytes, 'byte')}"
    yield Check("local-directory", "ok", f"{path}: {size}")
    yield from check_disk(path, settings.local_max_bytes)


def check_disk(path: str, max_bytes: int, statvfs: _Statvfs = os.statvfs) -> Iterator[Check]:
    """Check space and inodes where the local tier is."""
    try:
        status = _statvfs(path, statvfs)
    except (OSError, StoreError) as exc:
        yield Check("disk", "fault", f"{path}: {exc}", _WORKING_DISK, "unavailable")
        return
    free = status.f_bavail * status.f_frsize
    if free < min(_LITTLE_BYTES, max_bytes):
        problem = f"{free >> 20} MiB are free at {path}"
        yield Check("space", "warning", problem, "make room, or set local_max_bytes", "full")
    else:
        yield Check("space", "ok", f"{free >> 30} GiB are free")
    if status.f_files and status.f_favail < _FEW_INODES:  # some file systems count none
        problem = f"{status.f_favail} are free at {path}"
        yield Check("inodes", "warning", problem, "remove files, or set local_max_files", "full")
    else:
        yield Check("inodes", "ok", "there are enough")


def _statvfs(path: str, statvfs: _Statvfs) -> os.statvfs_result:
    """Return the status of the file system of ``path``, if it answers in time."""
    executor = DeadlineExecutor.of(path)
    try:
        return executor.call(lambda: statvfs(path))
    finally:
        executor.release()


def check_execution(
    statvfs: _Statvfs = os.statvfs, sysctl: str = "/proc/sys/vm/memfd_noexec"
) -> Iterator[Check]:
    """Check that code can be loaded from memory, for a hit, and from where torch compiles it."""
    if _text_of(sysctl).strip() == "2":  # from Linux 6.3
        problem = "the system loads no code from memory (vm.memfd_noexec=2), which hits need"
        yield Check("execution", "fault", problem, "sysctl vm.memfd_noexec=1", "machine")
    else:
        yield Check("execution", "ok", "code may be loaded from memory")
    path = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    place = path if os.path.isdir(path) else os.path.dirname(path) or "/"
    try:
        if not _statvfs(place, statvfs).f_flag & os.ST_NOEXEC:
            return
        problem = "is mounted noexec: what torch compiles there cannot be loaded"
    except (OSError, StoreError) as exc:
        problem = str(exc)
    fix = "set TORCHINDUCTOR_CACHE_DIR to another disk"
    yield Check("torch-directory", "fault", f"{place}: {problem}", fix, "machine")


def check_cpu(cpuinfo: str = "/proc/cpuinfo") -> Check:
    """Check for vector instructions: machines share code for the CPU if they have the same."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _text_of(cpuinfo), re.MULTILINE)
    known = flags[1].split() if flags else []
    best = [name for name in ("amx_int8", "avx512f", "avx2", "sve", "asimd") if name in known]
    arch = platform.machine()
    if best or flags is None:
        return Check("cpu", "ok", f"{arch} {' '.join(best)}".strip())
    problem = f"{arch} without vector instructions that torch compiles for"
    fix = "entries of machines with AVX2 or more are misses here, and theirs of yours"
    return Check("cpu", "warning", problem, fix)


def _text_of(path: str) -> str:
    """Return the content of a file of the system; ``""`` where there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# -- torch and the compiler


_TORCH = (sys.executable, "-W", "ignore", "-m", "s3cache.torch_api")
_REAP_S = 2.0


def check_torch(timeout_s: float = 180.0, command: Sequence[str] = _TORCH) -> Check:
    """Check, in a process of its own, that the installed torch has all that s3cache uses."""
    code, output = _run(command, timeout_s)
    last = (output.strip().splitlines() or [""])[-1]
    if code is None:
        problem = f"cannot be imported within {timeout_s:g} s"
        fix = "look at the disk that it is on, and at the machine's load"
        return Check("torch", "fault", problem, fix)
    if not last.startswith("torch "):
        problem = last or f"cannot be imported (exit code {code})"
        return Check("torch", "fault", problem, "pip install torch")
    if code == 0:
        return Check("torch", "ok", last)
    fix = "use a torch that docs/compatibility.md names"
    if "not supported" not in last:
        missing = [line.split()[-1] for line in output.splitlines() if line.startswith("MISSING")]
        last, fix = f"{last}: {', '.join(missing[:3])}", "use a torch as its release has it"
    return Check("torch", "fault", last, fix, "UnsupportedTorchError")


def check_compiler(timeout_s: float = 20.0) -> Check:
    """Check that a miss can be compiled for the CPU. A hit needs no compiler."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    path = next(filter(None, map(shutil.which, names)), None)
    fix = "install g++, or name one by CXX"
    if path is None:
        problem = f"there is none ({', '.join(names)}): hits need none, misses cannot be compiled"
        return Check("compiler", "warning", problem, fix)
    code, output = _run([path, "--version"], timeout_s)
    if code == 0:
        return Check("compiler", "ok", output.splitlines()[0] if output else path)
    how = f"no answer within {timeout_s:g} s" if code is None else f"exit code {code}"
    return Check("compiler", "fault", f"{path} does not work: {how}", fix)


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Return the exit code and all output; no code if it did not end in time and was killed."""
    try:
        process = subprocess.Popen(  # noqa: S603 - a compiler, or ourselves
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as exc:
        return -1, str(exc)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that hangs on a disk cannot even be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_REAP_S)
        return None, ""
    return process.returncode, output
