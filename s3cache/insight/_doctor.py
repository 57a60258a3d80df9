"""Check an installation: settings, remote, trust, disk, torch and the compiler."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias, TypeVar

from s3cache import entries
from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    PreconditionError,
    S3CacheError,
    TransientError,
    UntrustedError,
    code_of,
)
from s3cache.manage import EntryLocation
from s3cache.settings import Settings, unknown_variables
from s3cache.store import S3Options, Store, open_store, parse_url
from s3cache.tier import DiskTier, background, namespace_of
from s3cache.trust import Policy, pack, sign, signing_key_of
from s3cache.util.text import counted

_T = TypeVar("_T")
_WRITING = ("read-write", "write-only")

#: A ``fault`` keeps the cache from working, a ``warning`` does not.
Verdict: TypeAlias = Literal["ok", "warning", "fault", "skipped"]

#: The names of the checks; ``docs/doctor.md`` has a section on each.
Name: TypeAlias = Literal[
    "settings", "mode", "remote", "credentials", "list", "get", "put", "conditional-put",
    "read-back", "clock", "latency", "delete", "local-directory", "space", "uploads", "execution",
    "torch", "compiler", "trust", "signing",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: Name  # ``s3cache explain`` takes it
    verdict: Verdict
    found: str  # the problem, or that there is none
    fix: str = ""  # how to fix a warning or a fault
    code: str = ""  # another code for ``s3cache explain``, if any

    @property
    def codes(self) -> tuple[str, ...]:
        """Return the codes to look up in the docs; none if the check is ok."""
        codes = () if self.verdict in ("ok", "skipped") else (self.name, self.code)
        return tuple(filter(None, codes))


_FIXES: dict[type[S3CacheError], str] = {
    AccessDeniedError: "grant what infra/aws/s3cache-policy.json has; check the credentials",
    MissingContainerError: "make the bucket or directory, or mend the URL",
    TransientError: "check the endpoint, the proxy and the network",
    S3CacheError: "see docs/configuration.md",
}


def _failed(name: Name, error: S3CacheError, fix: str = "") -> Check:
    """Return an error as a fault; without ``fix``, with the fix for its class."""
    if isinstance(error, ConfigError):
        problem = f"{error.thing} {error.cause}"
        return Check(name, "fault", problem, error.fix, code_of(error))
    fix = fix or next(text for kind, text in _FIXES.items() if isinstance(error, kind))
    return Check(name, "fault", str(error), fix, code_of(error))


def examine(
    url: str | None = None, *, may_write: bool = True, programs: bool = True, timeout_s: float = 15
) -> Iterator[Check]:
    """Yield the result of every check, each in bounded time; a fault may cause later ones.

    Checks of the remote take at most ``timeout_s`` each. With ``may_write`` they write an object,
    and try to remove it. With ``programs``, torch and the compiler are started.
    """
    try:
        settings, _ = Settings.load(url)
    except ConfigError as exc:
        yield _failed("settings", exc)
        return
    yield from (checks := [*check_settings(settings, url)])
    if settings.url is not None and all(check.verdict != "fault" for check in checks):
        yield from _examine_remote(settings, settings.url, may_write, timeout_s)
    yield from check_local_dir(settings)
    yield check_execution()
    if programs:
        yield check_torch()
        yield check_compiler()
    yield from check_trust(settings)


# -- settings and trust


def check_settings(settings: Settings, url: str | None) -> Iterator[Check]:
    """List the origin of each setting, and find unknown environment variables."""
    origins = []
    for field in fields(Settings):
        variable = f"S3CACHE_{field.name.upper()}"
        is_argument = field.name == "url" and url is not None
        if is_argument or os.environ.get(variable):
            # Do not show keys, nor settings that may contain one.
            is_secret = not field.repr or field.name in ("url", "trusted_keys")
            value = "" if is_secret else f"={getattr(settings, field.name)}"
            origins.append(f"{field.name}{value} from {'--url' if is_argument else variable}")
    yield Check("settings", "ok", "; ".join([*origins, "all others are defaults"]))
    for variable, hint in unknown_variables():
        yield Check("settings", "warning", f"environment variable {variable} is not known", hint)
    if settings.mode == "off":
        problem = "is off: nothing is looked up or saved"
        yield Check("mode", "warning", problem, "set mode=read-write", "disabled")
    if settings.url is None:
        problem = "is not configured: nothing is shared with other machines"
        yield Check("remote", "warning", problem, "set S3CACHE_URL")
        return
    try:
        yield Check("remote", "ok", parse_url(settings.url).identity.partition("?")[0])
    except ConfigError as exc:
        yield _failed("remote", exc)


def check_trust(settings: Settings) -> Iterator[Check]:
    """List trusted signers; check that readers with the same keys use our entries."""
    try:
        policy = settings.trust_policy()
        key = settings.signing_key or ""
        signer = signing_key_of(key) if isinstance(key, str) else None
    except ConfigError as exc:
        yield _failed("trust", exc)
        return
    if policy.level == "off":
        text = "no key is trusted: anyone who can write to the bucket decides what its readers run"
        yield Check("trust", "warning", text, "s3cache keygen NAME, and docs/trust.md")
    else:
        names = ", ".join(f"{it.key.name} for {it.audience}" for it in policy.trusted)
        yield Check("trust", "ok", f"{policy.level}: {names}")
    audience, digest, now_s = settings.audience, bytes(32), int(time.time())
    if signer is None:
        if policy.level == "require" and settings.mode in _WRITING:
            problem = "entries from here are not signed: readers with the same keys do not use them"
            fix = "set signing_key, or mode=read-only"
            yield Check("signing", "warning", problem, fix, "untrusted")
        return
    try:
        signature = sign(digest, signer, audience=audience, issued_s=now_s, ttl_s=0)
        policy.check(digest, pack([signature]))
    except UntrustedError as exc:
        problem = f"entries that key {signer.name} signs here for {audience} miss here: {exc}"
        fix = f"add to trusted_keys: {audience}={signer.name}:..., as printed by keygen"
        yield Check("signing", "fault", problem, fix, "untrusted")
    else:
        yield Check("signing", "ok", f"key {signer.name} for {audience}")


# -- the remote

#: The object to write: not the name of an entry, but below the same prefix, because some policies
#: allow nothing else; and always the same.
_PROBE = "v1/s3cache-doctor/probe"
_PROBE_BYTES = 1 << 20
_TRIES = 5
_REPEAT_AFTER_S = 1.1
# S3 refuses requests that differ by 15 minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (RequestTimeTooSkewed)
_SKEW_S = 900.0
_SKEW_WARNED_S = 60.0


def _examine_remote(
    settings: Settings, url: str, may_write: bool, timeout_s: float
) -> Iterator[Check]:
    from s3cache.store import credentials_source

    location = parse_url(url)
    if has_rights := isinstance(location, S3Options):
        fix = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anonymous=true"
        try:  # a credential_process may hang
            work = asyncio.to_thread(credentials_source, location, timeout_s)
            source = _wait(work, 2 * timeout_s)
        except S3CacheError as exc:
            yield _failed("credentials", exc, f"{fix}; look at the profile's credential_process")
            return
        if source is None:
            yield Check("credentials", "fault", "were not found", fix, "denied")
            return
        yield Check("credentials", "ok", f"from {source}")
    try:
        store = open_store(url)
    except S3CacheError as exc:
        yield _failed("remote", exc)
        return
    with EntryLocation(store, is_local=False, policy=Policy()):
        writes = may_write and settings.mode in _WRITING
        yield from check_remote(
            store, may_write=writes, is_shared_by_rights=has_rights, timeout_s=timeout_s
        )


def _wait(work: Coroutine[Any, Any, _T], timeout_s: float, store: Store | None = None) -> _T:
    try:
        return background().wait(work, timeout_s)
    except concurrent.futures.TimeoutError:
        url, via = (store.url, store.via) if store is not None else ("", "")
        raise TransientError(f"no answer within {timeout_s:g} s{via}", store=url) from None


def check_remote(
    store: Store,
    *,
    may_write: bool = True,
    is_shared_by_rights: bool = True,
    timeout_s: float = 10.0,
    slow_s: float = 0.5,
    now: Callable[[], float] = time.time,
) -> Iterator[Check]:
    """Check the permissions in a store, its latency, and whether the clocks agree."""
    # Equal for all: several doctors may write it at once.
    data = random.Random(_PROBE).randbytes(_PROBE_BYTES)  # noqa: S311 - no secret

    async def allowed(name: Name, work: Awaitable[object]) -> Check:
        await work
        return Check(name, "ok", "allowed")

    async def patiently(call: Callable[[], Awaitable[None]]) -> None:
        """Repeat a call that fails for a while: some stores take one write of it a second."""
        for _ in range(_TRIES):
            try:
                await call()
            except TransientError as exc:
                error = exc
                await asyncio.sleep(_REPEAT_AFTER_S * random.uniform(1, 2))  # noqa: S311
            else:
                return
        raise error

    async def conditional_put() -> Check:
        is_overwritten = False
        for _ in range(_TRIES):
            with contextlib.suppress(PreconditionError):
                await patiently(lambda: store.put(_PROBE, data, mode="create"))
                is_overwritten = True
            is_atomic = await store.atomic_create()
            if is_overwritten or is_atomic is not None:
                break
            await asyncio.sleep(_REPEAT_AFTER_S)
        if is_atomic is False:
            problem = "the server ignores If-None-Match: of several writers, the last one wins"
            fix = "no entry is lost by this; a newer server supports it"
            return Check("conditional-put", "warning", problem, fix)
        if is_overwritten:
            problem = "an existing object was overwritten"
            return Check("conditional-put", "fault", problem, "use another server")
        if is_atomic is None:
            return Check("conditional-put", "ok", "the server takes too few writes to tell")
        return Check("conditional-put", "ok", "of several writers, exactly one succeeds")

    async def read_back() -> Check:
        stored = await store.get(_PROBE)
        if stored is None or bytes(stored) != data:
            problem, fix = "differs from the written bytes", "check proxies in between"
            return Check("read-back", "fault", problem, fix, "corrupt")
        return Check("read-back", "ok", "equals the written bytes")

    async def clock() -> Check:
        info = await store.head(_PROBE)
        apart_s = 0.0 if info is None else now() - info.modified
        if abs(apart_s) < _SKEW_WARNED_S:
            return Check("clock", "ok", "agrees with the store's")
        problem = f"is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the store's"
        fix = "synchronize it by NTP: chrony, or systemd-timesyncd"
        if abs(apart_s) < _SKEW_S:
            return Check("clock", "warning", problem, fix)
        problem += ": S3 refuses requests, and signatures expire too early or too late"
        return Check("clock", "fault", problem, fix, "denied")

    async def latency() -> Check:
        times = [time.perf_counter()]
        for _ in range(_TRIES):
            await store.head(_PROBE)
            times.append(time.perf_counter())
        median_s = median(end - start for start, end in itertools.pairwise(times))
        text = f"{median_s * 1000:.1f} ms for a small request"
        if median_s < slow_s:
            return Check("latency", "ok", text)
        fix = "use a bucket in this region, or s3cache pull before the job starts"
        return Check("latency", "warning", text, fix, "timeout")

    async def delete() -> Check:
        try:
            await store.delete(_PROBE)
        except AccessDeniedError:
            return Check("delete", "ok", "not allowed, as it should be")
        if not is_shared_by_rights:
            return Check("delete", "ok", "allowed, as for every writer here")
        problem = "allowed: these credentials can empty the cache; training does not need that"
        fix = "revoke s3:DeleteObject (infra/aws/s3cache-policy.json), unless you operate the cache"
        return Check("delete", "warning", problem, fix)

    checks: dict[Name, Callable[[], Coroutine[Any, Any, Check]]] = {
        # What a lookup lists: some stores list whole directories only.
        "list": lambda: allowed("list", anext(store.list(entries.name_prefix("0")), None)),
        "get": lambda: allowed("get", store.get(f"{_PROBE}-that-is-not-there")),
        "put": lambda: allowed("put", patiently(lambda: store.put(_PROBE, data))),
        "conditional-put": conditional_put,
        "read-back": read_back,
        "clock": clock,
        "latency": latency,
        "delete": delete,
    }
    for name, check in checks.items():
        if name == "put" and not may_write:
            yield Check("put", "skipped", "not tried: writing is off")
            return
        try:
            yield _wait(check(), timeout_s, store)
        except S3CacheError as exc:
            yield _failed(name, exc)
            if name == "put" or (name == "list" and not isinstance(exc, AccessDeniedError)):
                return  # later checks would fail too


# -- the local directory, and loading code from memory

_FEW_INODES = 1000


def check_local_dir(settings: Settings) -> Iterator[Check]:
    """Check within seconds that the local directory is usable, private, and has room."""
    if not settings.local:
        yield Check("local-directory", "skipped", "there is no local tier: local=false")
        return
    path, most = settings.local_dir, settings.local_max_bytes
    identity = ""
    with contextlib.suppress(ConfigError):  # which another check reports
        identity = parse_url(settings.url).identity if settings.url else ""
    try:
        tier = DiskTier(
            path,
            namespace=namespace_of(identity),
            max_bytes=most,
            max_files=settings.local_max_files,
        )
        with contextlib.closing(tier):
            used = tier.usage()
            left = tier.left_for_others()
            disk = tier.deadline.call(lambda: os.statvfs(path))
    except S3CacheError as exc:
        works = "works" if isinstance(exc, TransientError) else "you can write"
        yield _failed("local-directory", exc, f"set local_dir to a directory that {works}")
        return
    size = f"{counted(used.files, 'file')}, {counted(used.bytes, 'byte')}"
    yield Check("local-directory", "ok", f"{path}: {size}")
    free = disk.f_bavail * disk.f_frsize
    if free < min(1 << 30, most):
        problem = f"{free >> 20} MiB are free at {path}"
        yield Check("space", "warning", problem, "make room, or set local_max_bytes", "full")
    elif disk.f_files and disk.f_favail < min(_FEW_INODES, settings.local_max_files):
        problem = f"{counted(disk.f_favail, 'inode')} are free at {path}, see 'df -i'"
        yield Check("space", "warning", problem, "remove files there, or set local_dir", "full")
    else:
        yield Check("space", "ok", f"{free >> 30} GiB are free")
    for url, count in left.items():
        problem = f"ended jobs left uploads for another URL, {url}: {count}"
        fix = "run 's3cache push' with that URL, or spell endpoint_url as before"
        yield Check("uploads", "warning", problem, fix)
    if not left:
        yield Check("uploads", "ok", "none are left for another URL")


def check_execution(sysctl: Path = Path("/proc/sys/vm/memfd_noexec")) -> Check:
    """Check that code can be loaded from memory, as each hit needs."""
    with contextlib.suppress(OSError):
        if sysctl.read_text(encoding="ascii").strip() == "2":  # from Linux 6.3
            problem = "hits load code from memory, which this system forbids (vm.memfd_noexec=2)"
            return Check("execution", "fault", problem, "sysctl vm.memfd_noexec=1", "machine")
    return Check("execution", "ok", "code may be loaded from memory")


# -- torch and the compiler

_TORCH = (sys.executable, "-W", "ignore", "-m", "s3cache.torch_api")


def check_torch(timeout_s: float = 180.0, command: Sequence[str] = _TORCH) -> Check:
    """Check, in a separate process, that the installed torch has every name that s3cache uses."""
    code, output = _run(command, timeout_s)
    last = (output.strip().splitlines() or [f"cannot be imported (exit code {code})"])[-1]
    if code == 0:
        return Check("torch", "ok", last)
    if not last.startswith("torch "):
        return Check("torch", "fault", last, "pip install torch")
    missing = [line.split()[-1] for line in output.splitlines() if line.startswith("MISSING")]
    if missing and "not supported" not in last:
        last = f"{last}: {', '.join(missing[:3])}"
    fix = "use an unmodified release of torch that docs/compatibility.md lists"
    return Check("torch", "fault", last, fix, "UnsupportedTorchError")


def check_compiler(timeout_s: float = 20.0) -> Check:
    """Check that a miss can be compiled for the CPU. A hit needs no compiler."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    path = next(filter(None, map(shutil.which, names)), None)
    fix = "install g++, or set CXX"
    if path is None:
        problem = f"was not found ({', '.join(names)}): hits do not need it, misses do"
        return Check("compiler", "warning", problem, fix)
    code, output = _run([path, "--version"], timeout_s)
    if code == 0:
        return Check("compiler", "ok", (output.splitlines() or [path])[0])
    return Check("compiler", "fault", f"{path} does not work: {output or f'exit code {code}'}", fix)


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Return the exit code and all output; -1 and the reason if it did not run to its end."""
    try:
        done = subprocess.run(  # noqa: S603 - a compiler, or ourselves
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except OSError as exc:
        return -1, str(exc)
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {timeout_s:g} s"
    return done.returncode, done.stdout
