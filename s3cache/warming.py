"""Running a job until it compiles nothing more and all is uploaded, then ending it.

For a build step, or for one machine before a fleet starts: what the job looks up is recorded in the
local tier (:mod:`s3cache.records`), which is how it is seen from outside, whatever it is and
however many processes it has.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from s3cache.catalog import open_place
from s3cache.entries import name_prefix
from s3cache.errors import ConfigError, S3CacheError
from s3cache.records import Record, read_run, run_names
from s3cache.settings import Settings
from s3cache.store import listing
from s3cache.transfer import background

if TYPE_CHECKING:
    from s3cache.catalog import Place

__all__ = ["End", "Warmed", "warm"]

#: How the job ended: by itself; it compiles nothing more, and all is uploaded; out of time.
End: TypeAlias = Literal["itself", "quiet", "timeout"]

_POLL_S = 0.5
# What is being compiled for so many times the quiet time will not come any more.
_PATIENCE = 10
_TERMINATE_S = 30.0
_CALL_S = 30.0


@dataclass(frozen=True)
class Warmed:
    """What a job came to.

    Attributes:
        end: how it ended.
        exit_code: its own, if it ended by itself.
        hits, misses, bypasses: its lookups of whole graphs.
        added: how many of those that missed are in the local tier now.
        to_upload: what is there, and nowhere else yet.
    """

    end: End
    exit_code: int | None
    hits: int
    misses: int
    bypasses: int
    added: int
    to_upload: int

    @property
    def is_warm(self) -> bool:
        """Whether it did what it was run for."""
        return self.end != "timeout" and not self.exit_code and not self.to_upload


def warm(
    command: Sequence[str],
    *,
    quiet_s: float,
    timeout_s: float,
    url: str | None = None,
    told: Callable[[Warmed], None] = lambda _: None,
) -> Warmed:
    """Run ``command`` with the cache on until it has looked something up and then nothing for
    ``quiet_s``, what missed is saved, and all is uploaded; then end all its processes.

    Args:
        timeout_s: end it after that time in any case.
        told: called twice a second with how far it is.

    Raises:
        ConfigError: the settings name no remote or no local tier, or there is no such program.
        StoreError: the local tier cannot be used.
    """
    settings, _ = Settings.load(url)
    if settings.url is None:
        raise ConfigError("the cache", "has no URL", "give --url, or set S3CACHE_URL")
    if not settings.local:
        raise ConfigError("the local tier", "is off", "leave S3CACHE_LOCAL out for this")
    before = set(_runs(settings.local_dir))
    place = open_place(url, in_tier=True)
    try:
        job = _start(command, settings)
        try:
            return _watched(job, settings.local_dir, before, place, quiet_s, timeout_s, told)
        finally:
            _end(job)
    finally:
        with suppress(S3CacheError, concurrent.futures.TimeoutError):
            background().wait(place.store.aclose(), _CALL_S)


def _start(command: Sequence[str], settings: Settings) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "S3CACHE_URL": str(settings.url),
        "S3CACHE_LOCAL_DIR": settings.local_dir,
        "S3CACHE_AUTOLOAD": "1",
        "S3CACHE_RECORD": "1",
    }
    try:
        return subprocess.Popen(  # noqa: S603 - it is what it was asked to run
            command, env=environment, start_new_session=True
        )
    except OSError as exc:
        raise ConfigError(
            f"command {command[0]}", f"cannot be run ({exc.strerror})", "give another"
        ) from None


def _watched(
    job: subprocess.Popen[bytes],
    root: str,
    before: set[str],
    place: Place,
    quiet_s: float,
    timeout_s: float,
    told: Callable[[Warmed], None],
) -> Warmed:
    deadline = time.monotonic() + timeout_s
    saved: dict[str, bool] = {}
    while True:
        exit_code = job.poll()
        records = _records(root, before)
        for record in records:
            if record.outcome == "miss" and not saved.get(record.key):
                saved[record.key] = _is_saved(place, record.key)
        left = background().wait(place.to_upload(), _CALL_S)

        state = _state(records, exit_code, added=sum(saved.values()), to_upload=len(left))
        if exit_code is not None:
            return replace(state, end="itself")
        if time.monotonic() > deadline:
            return state
        if not left and _is_quiet(records, saved, quiet_s):
            return replace(state, end="quiet")
        told(state)
        with suppress(subprocess.TimeoutExpired):
            job.wait(_POLL_S)


def _state(
    records: Sequence[Record], exit_code: int | None, *, added: int, to_upload: int
) -> Warmed:
    """How far it is; should it end now, its time is over."""
    hits, misses, bypasses = (
        sum(each.outcome == what for each in records) for what in ("hit", "miss", "bypass")
    )
    return Warmed("timeout", exit_code, hits, misses, bypasses, added, to_upload)


def _is_quiet(records: Sequence[Record], saved: Mapping[str, bool], quiet_s: float) -> bool:
    if not records:
        return False
    quiet_for_s = time.time() - max(each.time for each in records)
    return quiet_for_s >= (quiet_s if all(saved.values()) else _PATIENCE * quiet_s)


def _runs(root: str) -> list[str]:
    try:
        return run_names(root)
    except (OSError, ConfigError):
        return []


def _records(root: str, before: set[str]) -> list[Record]:
    """Whole graphs that the job has looked up."""
    found: list[Record] = []
    for name in _runs(root):
        if name not in before:
            with suppress(OSError, ConfigError):  # it has gone meanwhile
                found += (each for each in read_run(root, name).records if each.level == "aot")
    return found


def _is_saved(place: Place, key: str) -> bool:
    async def is_there() -> bool:
        async with listing(place.store, name_prefix(key)) as objects:
            async for _ in objects:
                return True
        return False

    return bool(key) and background().wait(is_there(), _CALL_S)


def _end(job: subprocess.Popen[bytes]) -> None:
    """All its processes, those that it has started too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, number)
        with suppress(subprocess.TimeoutExpired):
            job.wait(_TERMINATE_S)
