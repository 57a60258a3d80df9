"""``s3cache explain`` and ``report``: why lookups missed, what codes mean, what a job looked up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from typer import Argument, Option

from s3cache.cli._options import Text, Texts, Url
from s3cache.cli._output import Output
from s3cache.errors import ConfigError
from s3cache.util import pages
from s3cache.util.words import counted

if TYPE_CHECKING:
    from s3cache.records import Record, Run
    from s3cache.util.pages import Section

__all__ = ["explain", "report"]

# -- explain

# Keys are hexadecimal, after a letter for their level. No code is (tests/util/test_pages.py).
_KEY = re.compile(r"[a-z]?[0-9a-f]*")


def _codes(incomplete: str) -> list[str]:
    """Complete a code for the shell."""
    there = (section.code for section in pages.sections())
    return [code for code in dict.fromkeys(there) if code.startswith(incomplete)]


def explain(
    out: Output,
    words: Annotated[
        Texts,
        Argument(
            metavar="[CODE...|KEY|SCRIPT]",
            help="A code in a message, such as untrusted, custom-operator or ConfigError; a key "
            "that was looked up, or its beginning; or a program, for its last run.",
            show_default=False,
            autocompletion=_codes,
        ),
    ] = None,
    run: Annotated[
        Text,
        Option(
            metavar="ID", help="A run, by the name that this command prints. Default: the last one."
        ),
    ] = None,
    module: Annotated[
        Text, Option("-m", metavar="MODULE", help="The last run of that module.")
    ] = None,
    local: Annotated[bool, Option("--local", help="Do not read the remote.")] = False,
    url: Url = None,
) -> int:
    """Explain why lookups missed: the nearest entry, and how its key differs; or what a code means.

    By default it explains the last process on this machine that looked something up. Lookups are
    recorded in the local tier (not with S3CACHE_RECORD=0). They are compared with earlier lookups,
    and with entries in the local tier and in the remote. Exits with 1 if anything missed or was
    bypassed.

    For a code (a reason, a bypass, an error, a check of doctor) it shows the section of the
    documentation, offline. A word that is a code, or the beginning of a recorded key, is taken as
    such: give a file of that name as ./NAME.
    """
    words = words or []
    target = _target(words[0]) if len(words) == 1 else {}
    if words and not target:
        for section in [section for word in words for section in _sections_on(word)]:
            _show_section(out, section)
        return 0
    from s3cache import insight

    found = insight.explain(
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
    """Return what a word is, if it is no code: a ``key`` or a ``script``."""
    if pages.sections_on(word):
        return {}
    from s3cache.insight import meaning

    return meaning(word) or ({"key": word} if _KEY.fullmatch(word) else {})


def _sections_on(word: str) -> list[Section]:
    """Return what the documentation says of a code.

    Raises:
        ConfigError: nothing; it names the codes that may be meant.
    """
    if found := pages.sections_on(word):
        return found
    there = {section.code.casefold(): section.code for section in pages.sections()}
    if not there:
        problem = "the pages are neither in the package nor beside it"
        raise ConfigError("documentation", problem, "install s3cache from its wheel")
    near = get_close_matches(word.casefold().replace("_", "-"), there, n=3)
    fix = "give a code, as s3cache explain untrusted, a script, the beginning of a key, or --run ID"
    if near:
        fix = f"did you mean {' or '.join(pages.command(there[each]) for each in near)}?"
    raise ConfigError(f"word {word!r}", "the documentation has no section on it", fix)


def _show_section(out: Output, section: Section) -> None:
    if out.json:
        out.record(asdict(section))
        return
    text, codes, places = section.without_links()
    out.markdown(f"{section.code}: {section.title}", text)
    if more := pages.footer(codes):
        out.line(more)
    if places:
        out.line(f"see also: {', '.join(places)}")


# -- report

_File = Optional[Path]  # noqa: UP045 - see _options.py


def report(
    out: Output,
    run: Annotated[
        Texts,
        Option("--run", metavar="ID", help="The job of that run; may be given several times."),
    ] = None,
    last: Annotated[int, Option("--last", metavar="N", min=1, help="The last N jobs.")] = 1,
    html: Annotated[
        _File, Option("--html", metavar="FILE", help="Write a self-contained HTML page.")
    ] = None,
    trace: Annotated[
        _File, Option("--trace", metavar="FILE", help="Write a trace for Perfetto and Chrome.")
    ] = None,
    manifest: Annotated[
        _File,
        Option("--manifest", metavar="FILE", help="Write the keys that were used, for pull."),
    ] = None,
) -> None:
    """Show what processes of this machine looked up: outcomes, times, and what hits spared.

    By default it shows the last job: one process, or all that torchrun, s3cache run or another
    launcher with S3CACHE_JOB has started. Processes record their lookups in the local tier (not
    with S3CACHE_RECORD=0).
    """
    from s3cache import insight
    from s3cache.records import ranks_in_words

    jobs = _selected_jobs(run or [], last)
    runs = [each for job in jobs for each in job]
    totals = insight.sum_up(runs)
    if html is not None:
        _write(html, insight.page(runs, _explainer(jobs)), out)
    if trace is not None:
        _write(trace, insight.trace(runs), out)
    if manifest is not None:
        _write(manifest, insight.manifest(runs), out)
    if out.json:
        counts = ("hits", "misses", "bypasses", "hit_rate", "spared_s", "waited_s", "complete")
        found: dict[str, object] = {"runs": [each.name for each in runs]}
        found |= {name: getattr(totals, name) for name in counts}
        found["outcomes"] = [
            {"outcome": outcome, "reason": reason, "count": count}
            for (outcome, reason), count in totals.outcomes.items()
        ]
        out.record(found)
        return
    for job in jobs:
        ranks = f", {ranks_in_words(job)}" if len(job) > 1 or job[0].rank else ""
        count = sum(insight.is_counted(record) for each in job for record in each.records)
        out.line(f"{job[0].name}: {job[0].program}{ranks}, {counted(count, 'lookup')}")
    rows = [(insight.name_of(*which), str(count)) for which, count in totals.outcomes.items()]
    out.table(["outcome", ">lookups"], rows)
    rate = "" if totals.hit_rate is None else f"{totals.hit_rate:.0%} of lookups hit; "
    out.line(
        f"{rate}{totals.spared_s:.1f} s of compiling spared, {totals.waited_s:.2f} s waited for"
    )
    if more := pages.footer(totals.codes):
        out.line(more)


def _write(path: Path, text: str, out: Output) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        problem = f"it cannot be written: {exc.strerror}"
        raise ConfigError(f"file {path}", problem, "give another path") from exc
    out.note(f"written to {path}")


def _explainer(jobs: list[list[Run]]) -> Callable[[Record], str]:
    """Return a function that says in a line what ``s3cache explain`` says of a lookup."""
    from s3cache.insight import explain

    lines = {
        (each.record.key, each.record.time): each.line
        for job in jobs
        for each in explain(job[0].name, remote=False).explanations
    }
    return lambda record: lines.get((record.key, record.time), "")


def _selected_jobs(names: list[str], last: int) -> list[list[Run]]:
    """Return the runs that are meant, by job, the earliest first.

    Raises:
        ConfigError: there is none of that name, or none at all.
    """
    from s3cache.records import in_jobs, read_head, read_run, run_names
    from s3cache.settings import Settings

    root = Settings.load()[0].local_dir
    known = run_names(root)
    for name in names:
        if name not in known:
            fix = f"it may be {known[0]}" if known else "S3CACHE_LOCAL_DIR says where to look"
            raise ConfigError(f"run {name}", f"none of that name is recorded in {root}", fix)
    jobs = list(in_jobs(read_head(root, name) for name in known))
    named = [job for job in jobs if any(run.name in names for run in job)]
    if not (jobs := named if names else jobs[:last]):
        fix = "run a program with the cache on, and without S3CACHE_RECORD=0"
        raise ConfigError("records of lookups", f"there are none in {root}", fix)
    return [[read_run(root, run.name) for run in job] for job in reversed(jobs)]
