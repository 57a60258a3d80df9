"""Running a job until it compiles nothing more and all is uploaded, then ending it.

For a build step, or for one machine before a fleet starts.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from s3cache.entries import name_prefix
from s3cache.errors import ConfigError, S3CacheError
from s3cache.manage._work import open_place
from s3cache.manage.job import Job, last_sign, steps_done
from s3cache.records import Record, Run
from s3cache.settings import Settings
from s3cache.store import listing
from s3cache.transfer import background

if TYPE_CHECKING:
    from s3cache.manage._work import Place

__all__ = ["End", "Warmed", "warm"]

#: How the job ended: by itself; it has done its steps, or compiles nothing more, and all is
#: uploaded; out of time.
End: TypeAlias = Literal["itself", "steps", "quiet", "timeout"]

# What missed and was compiled, and is not saved for so many times the quiet time, never will be.
_PATIENCE = 10
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
        steps: how often its optimizers have stepped since it first compiled.
    """

    end: End
    exit_code: int | None
    hits: int
    misses: int
    bypasses: int
    added: int
    to_upload: int
    steps: int = 0

    @property
    def compiled(self) -> bool:
        """Whether it compiled anything, or hit: without that it has warmed nothing."""
        return bool(self.hits or self.misses or self.bypasses)

    @property
    def is_warm(self) -> bool:
        """Whether it did what it was run for."""
        is_done = self.end != "timeout" and not self.exit_code and not self.to_upload
        return is_done and self.compiled


def warm(
    command: Sequence[str],
    *,
    quiet_s: float,
    timeout_s: float,
    steps: int | None = None,
    url: str | None = None,
) -> Warmed:
    """Run ``command`` with the cache on until it has looked something up and then compiled nothing
    for ``quiet_s``, what missed is saved, and all is uploaded; then end all its processes.

    Args:
        timeout_s: end it after that time in any case.
        steps: wait for so many steps of its optimizers instead of for ``quiet_s``. Those of a
            compiled optimizer cannot be seen, and inference has none: there it is ``quiet_s`` that
            ends it.

    Raises:
        ConfigError: the settings name no remote or no local tier, or there is no such program.
        StoreError: the local tier cannot be used.
    """
    settings, _ = Settings.load(url)
    if settings.url is None:
        raise ConfigError("the cache", "has no URL", "give --url, or set S3CACHE_URL")
    if not settings.local:
        raise ConfigError("the local tier", "is off", "leave S3CACHE_LOCAL out for this")
    place = open_place(url, in_tier=True)
    try:
        job = Job(command, settings.local_dir, {**os.environ, "S3CACHE_URL": settings.url})
        try:
            return _watched(job, place, quiet_s, timeout_s, steps)
        finally:
            job.end()
    finally:
        with suppress(S3CacheError, concurrent.futures.TimeoutError):
            background().wait(place.store.aclose(), _CALL_S)


def _watched(
    job: Job,
    place: Place,
    quiet_s: float,
    timeout_s: float,
    steps: int | None,
) -> Warmed:
    deadline = time.monotonic() + timeout_s
    saved: dict[str, bool] = {}
    while True:
        exit_code = job.exit_code
        runs = job.runs()
        records = [each for run in runs for each in run.records if each.level == "aot"]
        for record in records:
            if record.outcome == "miss" and not saved.get(record.key):
                saved[record.key] = _is_saved(place, record.key)
        left = background().wait(place.to_upload(), _CALL_S)

        state = _state(records, exit_code, sum(saved.values()), len(left), steps_done(runs))
        if exit_code is not None:
            return replace(state, end="itself")
        if time.monotonic() > deadline:
            return state
        if not left and records:
            end = _end(runs, saved, quiet_s, steps)
            if end is not None:
                return replace(state, end=end)
        job.wait()


def _state(
    records: Sequence[Record], exit_code: int | None, added: int, to_upload: int, steps: int
) -> Warmed:
    """How far it is; should it end now, its time is over."""
    hits, misses, bypasses = (
        sum(each.outcome == what for each in records) for what in ("hit", "miss", "bypass")
    )
    return Warmed("timeout", exit_code, hits, misses, bypasses, added, to_upload, steps)


def _end(
    runs: Sequence[Run], saved: Mapping[str, bool], quiet_s: float, steps: int | None
) -> End | None:
    """Why to end a job now that has nothing more to upload, if at all."""
    quiet_for_s = time.time() - (last_sign(runs) or time.time())
    all_saved = all(saved.values())
    if steps is not None and steps_done(runs) >= steps and quiet_for_s > 0:
        return "steps" if all_saved or quiet_for_s >= quiet_s else None
    return "quiet" if quiet_for_s >= (quiet_s if all_saved else _PATIENCE * quiet_s) else None


def _is_saved(place: Place, key: str) -> bool:
    async def is_there() -> bool:
        async with listing(place.store, name_prefix(key)) as objects:
            async for _ in objects:
                return True
        return False

    return bool(key) and background().wait(is_there(), _CALL_S)
