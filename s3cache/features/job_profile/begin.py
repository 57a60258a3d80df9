"""Follow a program's job profile in each process, and save its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache import frame
from s3cache.util.logs import Problems

if TYPE_CHECKING:
    from s3cache.cache import Engine
    from s3cache.features.job_profile.profile import JobProfile

#: A process saves its profile after this long without a lookup.
SETTLED_S = 30.0


def begin(engine: Engine) -> JobProfile | None:
    """Follow the profile of this process's program, and note what the process uses."""
    if not engine.has_remote:
        return None
    from s3cache.features.job_profile.profile import JobProfile

    settings, mode, problems = engine.settings, engine.settings.mode, Problems(strict=False)

    def save() -> None:
        try:
            if (data := job.encode()) is not None:
                engine.keep(frame.decode(data))
        except Exception as exc:  # noqa: BLE001 - the next process waits longer, no more
            problems.warn("job", "the job profile is not saved", exc)

    saves = mode not in ("off", "read-only")
    job = JobProfile(
        reads=mode != "write-only" and not settings.recache and engine.local.is_writable,
        save=save if saves else None,
        settled_s=SETTLED_S,
        max_bytes=settings.local_max_bytes // 2,
        on_problem=lambda exc: problems.warn("job", "a job profile is not used", exc),
    )
    engine.events.used.subscribe(job.note)
    engine.events.dropped.subscribe(job.forget)
    engine.events.remote_opened.subscribe(lambda remote: remote.begin(lambda: job.follow(remote)))
    if saves:
        engine.events.finishing.subscribe(save)
    return job
