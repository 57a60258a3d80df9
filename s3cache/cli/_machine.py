"""``s3cache doctor``, ``version``, ``keygen``, ``explain`` and ``report``: about this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from typer import Argument, Option

from s3cache.cli._options import URL, Output, redacted
from s3cache.errors import ConfigError
from s3cache.records import Record, Run, in_jobs, ranks_in_words, read_head, read_run, run_names
from s3cache.settings import Settings
from s3cache.trust import Algorithm, VerifyKey, generate
from s3cache.util import __version__
from s3cache.util.text import command, counted, footer, pointer, sections, sections_on


def doctor(
    out: Output,
    url: str | None = URL,
    write: bool = Option(True, "--write/--no-write", help="Write a test object, and remove it."),
    programs: bool = Option(
        True, "--programs/--no-programs", help="Also start torch and the compiler."
    ),
    timeout: float = Option(15.0, help="Seconds for any one request.", min=0.1),
) -> int:
    """Check settings, credentials, rights, latency, clock, disk, torch, compiler and trust.

    Each check has a verdict and, if something is wrong, a fix and the command that explains it.
    Exits with 1 if there is a fault. Every check ends in bounded time.
    """
    from s3cache.insight import examine

    faults = warnings = 0
    for check in examine(url, may_write=write, programs=programs, timeout_s=timeout):
        faults += check.verdict == "fault"
        warnings += check.verdict == "warning"
        found, fix = redacted(check.found), redacted(check.fix)
        if out.json:
            out.record(replace(check, found=found, fix=fix))
            continue
        out.line(f"{check.verdict:8} {check.name}: {found}")
        if fix:
            out.line(f"{'':8} fix: {fix}{f' {pointer(*check.codes)}' if check.codes else ''}")
    out.note(f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}")
    return 1 if faults else 0


_PACKAGES = (
    *("torch", "triton", "aioboto3", "aiobotocore", "botocore", "aiohttp", "msgpack"),
    *("zstandard", "pynacl", "typer", "rich"),
)


def version(out: Output) -> None:
    """Print the versions of s3cache and of everything that it needs, for a bug report."""
    found = {
        "s3cache": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "executable": sys.executable,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    if out.json:
        out.record(found)
    else:
        out.table((), found.items())


def keygen(
    out: Output,
    name: str = Argument(..., help="The name of the key, such as ci-main-1: readers see it."),
    to: str | None = Option(
        None, metavar="FILE", help="For the secret key.", show_default="NAME.key"
    ),
    shared: bool = Option(
        False, "--shared", help="One secret for all machines: each of them can then sign."
    ),
) -> None:
    """Make a key that signs entries, and the public key to trust.

    The secret key goes to a file that only you can read. The output has the settings for machines
    that save and for machines that read.
    """
    path = to or f"{name}.key"
    key = generate(name, Algorithm.HMAC_SHA256 if shared else Algorithm.ED25519)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        problem = f"cannot be made ({exc.strerror})"
        raise ConfigError(f"key file {path}", problem, "name another") from None
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # whatever the umask
        file.write(f"{key.secret_text()}\n")
    file_name = os.path.abspath(path)
    trusted = f"$(cat {file_name})" if shared else key.public_text()
    fingerprint = VerifyKey.parse(key.public_text()).fingerprint
    if out.json:
        public = None if shared else key.public_text()
        out.record({"signing_key": file_name, "trusted_key": public, "fingerprint": fingerprint})
        return
    sys.stdout.write(
        f"S3CACHE_SIGNING_KEY={file_name}  # where entries are saved\n"
        f'S3CACHE_TRUSTED_KEYS="{trusted}"  # where they are read\n'
        f"# to revoke it: S3CACHE_REVOKED={fingerprint}\n"
    )


# Keys are hexadecimal, after a letter for their level. No code is (tests/util/test_text.py).
_KEY = re.compile(r"[a-z]?[0-9a-f]*")


def _codes(incomplete: str) -> list[str]:
    """Complete a code for the shell."""
    there = (section.code for section in sections())
    return [code for code in dict.fromkeys(there) if code.startswith(incomplete)]


def explain(
    out: Output,
    words: list[str] | None = Argument(
        None,
        metavar="[CODE...|KEY|SCRIPT]",
        help="A code in a message, such as untrusted, custom-operator or ConfigError; a key "
        "that was looked up, or its beginning; or a program, for its last run.",
        show_default=False,
        autocompletion=_codes,
    ),
    run: str | None = Option(
        None,
        metavar="ID",
        help="A run, by the name that this command prints. Default: the last one.",
    ),
    module: str | None = Option(None, "-m", metavar="MODULE", help="The last run of that module."),
    local: bool = Option(False, "--local", help="Do not read the remote."),
    url: str | None = URL,
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
    target: dict[str, str] = {}
    if len(words) == 1 and not sections_on(words[0]):
        from s3cache import insight

        target = insight.meaning(words[0])
        if not target and _KEY.fullmatch(words[0]):
            target = {"key": words[0]}
    if not words or target:
        from s3cache import insight

        key, script = target.get("key"), target.get("script")
        found = insight.explain(
            run, key=key, script=script, module=module, url=url, remote=not local
        )
        if out.json:
            out.record(found.as_dict())
        else:
            out.text(str(found))
        return 1 if found.explanations else 0
    sections = [section for word in words for section in sections_on(word) or _unknown(word)]
    for section in sections:
        if out.json:
            out.record(asdict(section))
            continue
        text, codes, places = section.without_links()
        out.text(f"{section.code}: {section.title}\n\n{text}\n")
        if more := footer(codes):
            out.line(more)
        if places:
            out.line(f"see also: {', '.join(places)}")
    return 0


def _unknown(word: str) -> NoReturn:
    """Raise ConfigError with the codes that may be meant."""
    there = {section.code.casefold(): section.code for section in sections()}
    if not there:
        problem = "the pages are neither in the package nor beside it"
        raise ConfigError("documentation", problem, "install s3cache from its wheel")
    near = get_close_matches(word.casefold().replace("_", "-"), there, n=3)
    fix = "give a code, as s3cache explain untrusted, a script, the beginning of a key, or --run ID"
    if near:
        fix = f"did you mean {' or '.join(command(there[each]) for each in near)}?"
    raise ConfigError(f"word {word!r}", "the documentation has no section on it", fix)


def report(
    out: Output,
    run: list[str] | None = Option(
        None, "--run", metavar="ID", help="The job of that run; may be given several times."
    ),
    last: int = Option(1, "--last", metavar="N", min=1, help="The last N jobs."),
    html: Path | None = Option(
        None, "--html", metavar="FILE", help="Write a self-contained HTML page."
    ),
    trace: Path | None = Option(
        None, "--trace", metavar="FILE", help="Write a trace for Perfetto and Chrome."
    ),
    manifest: Path | None = Option(
        None, "--manifest", metavar="FILE", help="Write the keys that were used, for pull."
    ),
) -> None:
    """Show what processes of this machine looked up: outcomes, times, and what hits spared.

    By default it shows the last job: one process, or all that torchrun, s3cache run or another
    launcher with S3CACHE_JOB has started. Processes record their lookups in the local tier (not
    with S3CACHE_RECORD=0).
    """
    from s3cache import insight

    jobs = _selected_jobs(run or [], last)
    runs = [each for job in jobs for each in job]
    totals = insight.sum_up(runs)
    files: list[tuple[Path | None, Callable[[], str]]] = [
        (html, lambda: insight.page(runs, _explainer(jobs))),
        (trace, lambda: insight.trace(runs)),
        (manifest, lambda: insight.manifest(runs)),
    ]
    for path, text in files:
        if path is not None:
            try:
                path.write_text(text(), encoding="utf-8")
            except OSError as exc:
                cause = f"it cannot be written: {exc.strerror}"
                raise ConfigError(f"file {path}", cause, "give another path") from exc
            out.note(f"written to {path}")
    if out.json:
        outcomes = [
            {"outcome": outcome, "reason": reason, "count": count}
            for (outcome, reason), count in totals.outcomes.items()
        ]
        more = {"runs": [each.name for each in runs], "hit_rate": totals.hit_rate}
        out.record({**asdict(totals), **more, "outcomes": outcomes})
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
    if read_on := footer(totals.codes):
        out.line(read_on)


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
    """Return the runs that are meant, by job, the earliest first."""
    root = Settings.load()[0].local_dir
    known = run_names(root)
    if unknown := {*names} - {*known}:
        fix = f"it may be {known[0]}" if known else "S3CACHE_LOCAL_DIR says where to look"
        raise ConfigError(f"run {min(unknown)}", f"none of that name is recorded in {root}", fix)
    jobs = list(in_jobs(read_head(root, name) for name in known))
    jobs = [job for job in jobs if any(run.name in names for run in job)] if names else jobs[:last]
    if not jobs:
        fix = "run a program with the cache on, and without S3CACHE_RECORD=0"
        raise ConfigError("records of lookups", f"there are none in {root}", fix)
    return [[read_run(root, run.name) for run in job] for job in reversed(jobs)]
