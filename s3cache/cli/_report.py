"""``s3cache report``: what a job looked up, in numbers, and as a page to keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from s3cache._pages import footer
from s3cache._words import counted
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache.records import Record, Run

__all__ = ["report"]

# ruff: noqa: UP045 - Typer reads annotations while the program runs, in Python 3.10 too


@grouped(out=Output)
def report(
    out: Output,
    run: Annotated[
        Optional[list[str]],
        typer.Option(
            "--run", metavar="ID", help="The job of that run; may be given several times."
        ),
    ] = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="The last N jobs.")] = 1,
    html: Annotated[
        Optional[Path],
        typer.Option("--html", metavar="FILE", help="Write a page of HTML that stands by itself."),
    ] = None,
    trace: Annotated[
        Optional[Path],
        typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto and Chrome."),
    ] = None,
    manifest: Annotated[
        Optional[Path],
        typer.Option("--manifest", metavar="FILE", help="Write the keys that were used, for pull."),
    ] = None,
) -> None:
    """Show what processes of this machine looked up: how it ended, when, and what it spared.

    Of the last job, unless --run or --last says otherwise: of one process, or of all that torchrun,
    s3cache run or whoever sets S3CACHE_JOB has started. Processes record it in the local tier
    (S3CACHE_RECORD=0: none).
    """
    from s3cache.records import ranks_in_words
    from s3cache.report import is_counted, name_of, page, sum_up
    from s3cache.report import manifest as listed
    from s3cache.report import trace as traced

    jobs = _jobs(run or [], last)
    runs = [each for job in jobs for each in job]
    totals = sum_up(runs)
    if html is not None:
        _write(html, page(runs, _explainer(jobs)), out)
    if trace is not None:
        _write(trace, traced(runs), out)
    if manifest is not None:
        _write(manifest, listed(runs), out)
    if out.json:
        out.record(
            {
                "runs": [each.name for each in runs],
                "hits": totals.hits,
                "misses": totals.misses,
                "bypasses": totals.bypasses,
                "hit_rate": totals.hit_rate,
                "spared_s": totals.spared_s,
                "waited_s": totals.waited_s,
                "complete": totals.complete,
                "outcomes": [
                    {"outcome": outcome, "reason": reason, "count": count}
                    for (outcome, reason), count in totals.outcomes.items()
                ],
            }
        )
        return
    for job in jobs:
        ranks = f", {ranks_in_words(job)}" if len(job) > 1 or job[0].rank else ""
        count = sum(is_counted(record) for each in job for record in each.records)
        out.line(f"{job[0].name}: {job[0].program}{ranks}, {counted(count, 'lookup')}")
    rows = [
        (name_of(outcome, reason), str(count))
        for (outcome, reason), count in totals.outcomes.items()
    ]
    out.table(["outcome", ">lookups"], rows)
    rate = "" if totals.hit_rate is None else f"{totals.hit_rate:.0%} of lookups hit; "
    out.line(
        f"{rate}{totals.spared_s:.1f} s of compiling spared, {totals.waited_s:.2f} s waited for"
    )
    if more := footer(totals.codes):
        out.line(more)


def _write(path: Path, text: str, out: Output) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        problem = f"it cannot be written: {exc.strerror}"
        raise ConfigError(f"file {path}", problem, "give another path") from exc
    out.note(f"written to {path}")


def _explainer(jobs: list[list[Run]]) -> Callable[[Run, Record], str]:
    """Says what a miss or a bypass is due to, as ``s3cache explain`` does, in a line."""
    from s3cache.explaining import explain

    words: dict[tuple[str, float], str] = {}
    for job in jobs:
        for each in explain(job[0].name, remote=False).explanations:
            differing = [found.text for found in each.differences if not found.follows]
            reasons = [
                "; ".join(filter(None, (reason.get("message"), reason.get("line"))))
                for reason in each.record.reasons
            ]
            why = "; ".join([*each.record.rejected, *differing, *reasons]) or each.why
            words[each.record.key, each.record.time] = why.strip()
    return lambda _, record: words.get((record.key, record.time), "")


def _jobs(names: list[str], last: int) -> list[list[Run]]:
    """The runs that are meant, by the jobs that they are of, the earliest first.

    Raises:
        ConfigError: there is none of that name, or none at all.
    """
    from s3cache.records import in_jobs, read_head, read_run, run_names
    from s3cache.settings import Settings

    settings, _ = Settings.load()
    known = run_names(settings.local_dir)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"run {name}",
                f"none of that name is recorded in {settings.local_dir}",
                f"it may be {known[0]}" if known else "S3CACHE_LOCAL_DIR says where to look",
            )
    jobs = in_jobs(read_head(settings.local_dir, name) for name in known)
    chosen = (
        [job for job in jobs if any(run.name in names for run in job)] if names else jobs[:last]
    )
    if not chosen:
        raise ConfigError(
            "records of lookups",
            f"there are none in {settings.local_dir}",
            "run a program with the cache on, and without S3CACHE_RECORD=0",
        )
    return [[read_run(settings.local_dir, run.name) for run in job] for job in reversed(chosen)]
