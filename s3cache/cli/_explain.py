"""``s3cache explain`` and ``report``: why lookups missed, what codes mean, what a job looked up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from s3cache import _pages
from s3cache._pages import footer
from s3cache._words import counted
from s3cache.cli._options import Url, grouped
from s3cache.cli._output import Output
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache._pages import Section
    from s3cache.records import Record, Run

__all__ = ["explain", "report"]

# ruff: noqa: UP045 - see _options.py

# -- explain


# Keys are hexadecimal, after a letter for their level. No code is (tests/test_pages.py).
_KEY = re.compile(r"[a-z]?[0-9a-f]*")


def _codes(incomplete: str) -> list[str]:
    """For the shell: the codes that begin so."""
    there = (section.code for section in _pages.sections())
    return [code for code in dict.fromkeys(there) if code.startswith(incomplete)]


@grouped(out=Output)
def explain(
    out: Output,
    words: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[CODE...|KEY|SCRIPT]",
            help="What messages name, such as untrusted, custom-operator or ConfigError; what was "
            "looked up, or the beginning of it; or the program whose last run is meant.",
            show_default=False,
            autocompletion=_codes,
        ),
    ] = None,
    run: Annotated[
        Optional[str],
        typer.Option(metavar="ID", help="A run, as this prints it. Default: the last one."),
    ] = None,
    module: Annotated[
        Optional[str],
        typer.Option("-m", metavar="MODULE", help="The last run of that module, which -m ran."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Do not read the remote.")] = False,
    url: Url = None,
) -> int:
    """Say why lookups missed: the nearest entry, and what its key differs in; or what a code means.

    Of the last process on this machine that looked something up, unless told otherwise. What was
    looked up is recorded in the local tier (S3CACHE_RECORD=0: it is not). It is compared with what
    was looked up before, and with entries in the local tier and in the remote. Exits with 1 if
    anything missed or was bypassed.

    Of a code (a reason, that of a bypass, the name of an error, a check of doctor) it shows,
    offline, the section that the documentation has on it. What is a code, or on record as the
    beginning of a key, is taken as such; a file of that name is given as ./NAME then.
    """
    words = words or []
    target = _target(words[0]) if len(words) == 1 else {}
    if words and not target:
        for section in [section for word in words for section in _sections_on(word)]:
            _show_section(out, section)
        return 0
    from s3cache.insight import explain as explained

    found = explained(
        run,
        key=target.get("key"),
        script=target.get("script"),
        module=module,
        url=url,
        remote=not local,
    )
    if out.json:
        out.record(found.as_dict())
    else:
        out.text(str(found))
    return 1 if found.explanations else 0


def _target(word: str) -> dict[str, str]:
    """What a word is, if it is no code: a ``key`` or a ``script``."""
    if _pages.sections_on(word):
        return {}
    from s3cache.insight import meaning

    return meaning(word) or ({"key": word} if _KEY.fullmatch(word) else {})


def _sections_on(word: str) -> list[Section]:
    """What the documentation says of a code.

    Raises:
        ConfigError: nothing. The codes that it may be meant to be are named.
    """
    from difflib import get_close_matches

    if found := _pages.sections_on(word):
        return found
    there = {section.code.casefold(): section.code for section in _pages.sections()}
    if not there:
        problem = "the pages are neither in the package nor beside it"
        raise ConfigError("documentation", problem, "install s3cache from its wheel")
    near = get_close_matches(word.casefold().replace("_", "-"), there, n=3)
    fix = "give a code, as s3cache explain untrusted, a script, the beginning of a key, or --run ID"
    if near:
        fix = f"did you mean {' or '.join(_pages.command(there[each]) for each in near)}?"
    raise ConfigError(f"word {word!r}", "the documentation has no section on it", fix)


def _show_section(out: Output, section: Section) -> None:
    if out.json:
        out.record(asdict(section))
        return
    text, codes, places = section.without_links()
    out.markdown(f"{section.code}: {section.title}", text)
    if more := footer(codes):
        out.line(more)
    if places:
        out.line(f"see also: {', '.join(places)}")


# -- report


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
    from s3cache.insight import is_counted, name_of, page, sum_up
    from s3cache.insight import manifest as listed
    from s3cache.insight import trace as traced
    from s3cache.records import ranks_in_words

    jobs = _selected_jobs(run or [], last)
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
    from s3cache.insight import explain

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


def _selected_jobs(names: list[str], last: int) -> list[list[Run]]:
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
