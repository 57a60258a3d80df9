"""``s3cache warm``: run a job until it compiles nothing more and all is uploaded, then end it.

For a build step, or for one machine before a fleet starts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from s3cache.entries import name_prefix
from s3cache.errors import ConfigError
from s3cache.manage._work import Place, open_place, url_of
from s3cache.manage.job import Job, quiet_for_s, steps_done
from s3cache.records import Run
from s3cache.settings import Settings
from s3cache.store import listing
from s3cache.tier import background

__all__ = ["End", "Warmed", "warm"]

#: How the job ended: by itself; it has done its steps, or compiles nothing more, and all is
#: uploaded; out of time.
End: TypeAlias = Literal["itself", "steps", "quiet", "timeout"]

# A graph that missed and is not saved after so many times the quiet time never will be.
_UNSAVED_FACTOR = 10
_CALL_S = 30.0


@dataclass(frozen=True)
class Warmed:
    """The result of a job.

    Attributes:
        end: how it ended.
        exit_code: its own, if it ended by itself.
        hits, misses, bypasses: its lookups of whole graphs.
        added: how many of those that missed are in the local tier now.
        to_upload: entries that are there, and not uploaded yet.
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
        """Return whether it compiled anything, or hit: without that it has warmed nothing."""
        return bool(self.hits or self.misses or self.bypasses)

    @property
    def is_warm(self) -> bool:
        """Return whether it did what it was run for."""
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
    environment = {**os.environ, "S3CACHE_URL": url_of(settings)}
    if not settings.local:
        raise ConfigError("the local tier", "is off", "leave S3CACHE_LOCAL out for this")
    saved: dict[str, bool] = {}
    with (
        open_place(url, in_tier=True) as place,
        Job(command, settings.local_dir, environment) as job,
    ):
        for runs in job.looks(timeout_s):
            outcomes = [
                (each.outcome, each.key)
                for run in runs
                for each in run.records
                if each.level == "aot"
            ]
            for outcome, key in outcomes:
                if outcome == "miss" and not saved.get(key):
                    saved[key] = _is_saved(place, key)
            left = len(background().wait(place.to_upload(), _CALL_S))
            is_done = outcomes and not left
            end: End | None = "itself" if job.exit_code is not None else None
            end = end or (_end(runs, saved, quiet_s, steps) if is_done else None)
            if end is not None:
                break
        counts = Counter(outcome for outcome, _ in outcomes)
        return Warmed(
            end=end or "timeout",
            exit_code=job.exit_code,
            hits=counts["hit"],
            misses=counts["miss"],
            bypasses=counts["bypass"],
            added=sum(saved.values()),
            to_upload=left,
            steps=steps_done(runs),
        )


def _end(
    runs: Sequence[Run], saved: Mapping[str, bool], quiet_s: float, steps: int | None
) -> End | None:
    """Return why to end a job now that has nothing more to upload, if at all."""
    quiet_now_s = quiet_for_s(runs)
    all_saved = all(saved.values())
    if steps is not None and steps_done(runs) >= steps and quiet_now_s > 0:
        return "steps" if all_saved or quiet_now_s >= quiet_s else None
    enough_s = quiet_s if all_saved else _UNSAVED_FACTOR * quiet_s
    return "quiet" if quiet_now_s >= enough_s else None


def _is_saved(place: Place, key: str) -> bool:
    async def is_there() -> bool:
        async with listing(place.store, name_prefix(key)) as objects:
            return await anext(objects, None) is not None

    return bool(key) and background().wait(is_there(), _CALL_S)
