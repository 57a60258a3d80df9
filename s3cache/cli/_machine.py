"""Commands on programs, on recorded lookups, and on this machine's setup."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from s3cache.cli._options import URL, JobOptions, Output, duration_s, named_file, option, size_text
from s3cache.cli._run import arguments_of, run_program
from s3cache.errors import ConfigError
from s3cache.records import Run, in_jobs, processes_in_words, recorded
from s3cache.settings import Settings
from s3cache.trust import Algorithm, VerifyKey, generate
from s3cache.util.text import command as command_on
from s3cache.util.text import counted, footer, pointer, redacted, sections, sections_on

if TYPE_CHECKING:
    from s3cache.insight import Explained

# -- programs

PROGRAM: list[str] = Argument(
    ..., metavar="PROGRAM [ARGUMENT]...", help="A program as for python, with its arguments."
)
MODULE: bool = Option(False, "-m", help="A module, not a script.")
COMMAND: bool = Option(False, "-c", help="Code, not a script.")


def run(
    program: list[str] = PROGRAM,
    url: str | None = URL,
    as_json: bool = Option(False, "--json", help="Print the summary as a JSON object."),
    module: bool = MODULE,
    command: bool = COMMAND,
) -> None:
    """Run a Python program unchanged, with s3cache turned on.

    A program is anything that python runs: a script, a .pyc, a directory or zip file with a
    __main__, - for standard input, a module or code. Arguments after its name belong to the
    program. Python runs it in this process, with environment variables that turn s3cache on, also
    in child processes. Every process that compiles prints its hits and misses in one line at the
    end (S3CACHE_SUMMARY=0: no line).
    """
    run_program(program, url=url, json=as_json, module=module, command=command)


_ENDS = {
    "itself": "ended by itself",
    "quiet": "was ended: it compiled nothing more (--quiet)",
    "graphs": "was ended: it compiled enough graphs (--graphs)",
    "timeout": "was ended: it timed out (--timeout)",
    "interrupted": "was ended: interrupted",
}


def _end_of(what: str, done: Mapping[str, Any]) -> str:
    code = done["exit_code"]
    return f"the {what} {_ENDS[done['end']]}{f' with {code}' if code else ''}"


def check(
    out: Output,
    program: list[str] = PROGRAM,
    module: bool = MODULE,
    command: bool = COMMAND,
    quiet: str = option("TIME", "End it after this time without a compile; 0: never.", "30s"),
    graphs: int | None = Option(None, metavar="N", help="End it after this many graphs.", min=1),
    timeout: str = option("TIME", "End it after this time in any case; 0: never.", "2h"),
) -> int:
    """Run a program, and report for each graph that it compiles whether it can be cached.

    The program compiles as usual, in a separate process. No bucket is needed, read or written,
    unless the program itself turns s3cache on. If a graph cannot be cached, all reasons are listed,
    with the line in the program and a fix. When the program has compiled something and then nothing
    for --quiet, it gets SIGTERM, as from a scheduler. So training that takes days ends after its
    first steps, and saves nothing. Exits with 1 if a graph cannot be cached as a whole, or if
    nothing was compiled.
    """
    from s3cache.manage.programs import check_program

    report = check_program(
        arguments_of(program, module=module, command=command),
        quiet_s=duration_s("--quiet", quiet) or float("inf"),
        timeout_s=duration_s("--timeout", timeout) or float("inf"),
        graphs=graphs or float("inf"),
        to_stderr=out.json,
    )
    if out.json:
        out.record(report.as_dict())
    else:
        out.note(_end_of("program", report.program))
        nothing = "no graph: the program called nothing that torch.compile compiles with Inductor"
        out.text(str(report) if report.graphs else nothing)
    return 130 if report.program["end"] == "interrupted" else 0 if report.cacheable else 1


def warm(
    out: Output,
    job: JobOptions,
    command: list[str] = Argument(..., metavar="-- COMMAND...", help="The job, as in a shell."),
    quiet: str = option("TIME", "End it after this time without a compile.", "60s"),
    timeout: str = option("TIME", "End it after this time in any case.", "2h"),
    url: str | None = URL,
) -> int:
    """Run a job until it compiles nothing more and everything is uploaded, then end it.

    Use it in a build step, or on one machine before a fleet starts: then the remote has all entries
    that the job compiled. The cache is on in all processes of the job, which end with SIGTERM.
    Exits with 1 after a timeout, if the job failed, if uploads are missing, or if the job compiled
    nothing.
    """
    from s3cache.manage import programs

    done = programs.warm(
        command,
        quiet_s=duration_s("--quiet", quiet),
        timeout_s=duration_s("--timeout", timeout),
        url=url,
        environments=job.environments,
    )
    if out.json:
        out.record(done)
    out.note(_end_of("job", done))  # notes are not written with --json
    if done["to_upload"]:
        out.note(f"{done['to_upload']} not uploaded")
    counts = (
        f"{counted(done['hits'], 'graph')} hit, {done['misses']} missed, of which "
        f"{done['added']} are in the cache now; {done['bypasses']} bypassed"
    )
    nothing = (
        "nothing was compiled, so nothing is warm: the job called nothing that torch.compile "
        "compiles with Inductor, or turned the cache off; s3cache check lists its graphs"
    )
    out.note(counts if done["hits"] or done["misses"] or done["bypasses"] else nothing)
    return 130 if done["end"] == "interrupted" else 0 if done["is_warm"] else 1


def recording(describe: Callable[[], object]) -> Callable[[Output], None]:
    """Return a command that shows what a function of a feature returns."""

    def command(out: Output) -> None:
        out.record(describe())

    command.__name__, command.__doc__ = describe.__name__, describe.__doc__
    return command


# -- recorded lookups


def explain(
    out: Output,
    words: list[str] | None = Argument(
        None,
        metavar="[CODE...|RUN|KEY|PROGRAM]",
        help="A code in a message, such as untrusted, custom-operator or ConfigError; a run, by "
        "the name that this command prints, or a key that was looked up, or the beginning of "
        "either; or a script or module, for its last run.",
        show_default=False,
    ),
    local: bool = Option(False, "--local", help="Do not read the remote."),
    url: str | None = URL,
) -> int:
    """Explain why lookups missed: the nearest entry, and how its key differs; or explain a code.

    By default it explains the last process on this machine that had lookups. Lookups are recorded
    in the local tier (not with S3CACHE_RECORD=0). They are compared with earlier lookups, and with
    entries in the local tier and in the remote. Exits with 1 if a lookup missed or was bypassed.

    For a code (of a reason, bypass, error, doctor check or feature) it shows the section of the
    documentation, offline. A code takes precedence over a file with the same name: write ./NAME for
    the file.
    """
    code = 0
    for word in words or [""]:
        on_code = sections_on(word)
        for section in on_code:
            if out.json:
                out.record(section)
            else:
                out.text(f"{section.code}: {section.title}\n\n{section.text}\n")
        if not on_code:
            explained = _explained(word, local, url)
            code |= bool(explained.explanations)
            if out.json:
                out.record(explained.as_dict())
            else:
                out.text(str(explained))
    return code


def _explained(word: str, local: bool, url: str | None) -> Explained:
    from s3cache import insight

    try:
        return insight.explain(word, url=url, remote=not local)
    except ConfigError:
        codes = {section.code.casefold(): section.code for section in sections()}
        near = get_close_matches(word.casefold().replace("_", "-"), codes, n=3)
        if not near:
            raise
        fix = f"did you mean {' or '.join(command_on(codes[word]) for word in near)}?"
        problem = "is not a code, nor a run, key or program that is recorded here"
        raise ConfigError(f"word {word!r}", problem, fix) from None


def report(
    out: Output,
    run: list[str] | None = option("ID", "The job of this run; may be repeated."),
    last: int = Option(1, "--last", metavar="N", min=1, help="The last N jobs."),
    html: Path | None = option("FILE", "Write a self-contained HTML page."),
    trace: Path | None = option("FILE", "Write a trace for Perfetto and Chrome."),
    manifest: Path | None = option("FILE", "Write the keys that were used, for pull."),
) -> None:
    """Show the lookups of processes on this machine: outcomes, times, and compile time saved.

    By default it shows the last job: one process, or all processes that torchrun, s3cache run or
    another launcher with S3CACHE_JOB has started. Processes record their lookups in the local tier
    (not with S3CACHE_RECORD=0).
    """
    from s3cache import insight

    jobs = _jobs(run or (), last)
    runs = [process for job in jobs for process in job]
    totals = insight.sum_up(runs)

    def page(runs: Sequence[Run]) -> str:
        explained = [insight.explain(job[0].name, remote=False) for job in jobs]
        return insight.page(runs, [why for of_job in explained for why in of_job.explanations])

    for path, write in ((html, page), (trace, insight.trace), (manifest, insight.manifest)):
        if path is not None:
            with named_file(f"file {path}", "written"):
                path.write_text(write(runs), encoding="utf-8")
            out.note(f"written to {path}")
    if out.json:
        out.record({**totals.as_dict(), "runs": [process.name for process in runs]})
        return
    for job in jobs:
        processes = f", {processes_in_words(job)}" if len(job) > 1 or job[0].process else ""
        count = sum(insight.is_counted(record) for process in job for record in process.records)
        out.line(f"{job[0].name}: {job[0].program}{processes}, {counted(count, 'lookup')}")
    rows = [(insight.name_of(*which), str(count)) for which, count in totals.outcomes.items()]
    out.table(["outcome", ">lookups"], rows)
    rate = "" if totals.hit_rate is None else f"{totals.hit_rate:.0%} of lookups hit; "
    out.line(
        f"{rate}{totals.spared_s:.1f} s of compiling spared, {totals.waited_s:.2f} s waited for"
    )
    lines = [*totals.in_words, footer(totals.codes)]
    if totals.unused:
        unused = f"{counted(totals.unused, 'entry', 'entries')} of {size_text(totals.unused_bytes)}"
        lines.insert(0, f"fetched and not used: {unused}")
    for line in filter(None, lines):
        out.line(line)


def _jobs(names: Sequence[str], last: int) -> list[list[Run]]:
    """Return the jobs of the runs with these names, else the last jobs; earliest job first."""
    settings, _ = Settings.load()
    jobs = in_jobs(recorded(settings.local_dirs, heads=True))
    named = [job for job in jobs if any(run.name.startswith(tuple(names)) for run in job)]
    chosen = {run.name for job in (named if names else jobs[:last]) for run in job}
    if not chosen:
        problem = f"there are none in {settings.local_dir}, or none of that run"
        fix = "run a program with the cache on, and without S3CACHE_RECORD=0"
        raise ConfigError("records of lookups", problem, fix)
    return in_jobs(recorded(settings.local_dirs, chosen.__contains__))[::-1]


# -- the bucket, the setup and keys


def doctor(
    out: Output,
    url: str | None = URL,
    write: bool = Option(True, "--write/--no-write", help="Write a test object, and remove it."),
    programs: bool = Option(True, help="Also start torch and the compiler."),
    timeout: float = Option(15.0, help="Seconds for any one check of the remote.", min=0.1),
) -> int:
    """Check settings, credentials, permissions, latency, clock, disk, torch, compiler and trust.

    Each check prints a verdict and, for a problem, a fix and the command that explains it.
    Exits with 1 if there is a fault. Every check ends in bounded time.
    """
    from s3cache.insight import examine

    verdicts: Counter[str] = Counter()
    for check in examine(url, may_write=write, programs=programs, timeout_s=timeout):
        verdicts[check.verdict] += 1
        check = replace(check, found=redacted(check.found), fix=redacted(check.fix))
        if out.json:
            out.record(check)
            continue
        out.line(f"{check.verdict:8} {check.name}: {check.found}")
        if check.fix:
            out.line(f"{'':8} fix: {check.fix}{f' {pointer(*check.codes)}' if check.codes else ''}")
    out.note(", ".join(counted(verdicts[verdict], verdict) for verdict in ("fault", "warning")))
    return 1 if verdicts["fault"] else 0


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
    """Make a key that signs entries, and its public key, for readers to trust.

    The secret key is written to a file that only you can read. The output has the settings for
    machines that save and for machines that read.
    """
    path = to or f"{name}.key"
    key = generate(name, Algorithm.HMAC_SHA256 if shared else Algorithm.ED25519)
    with named_file(f"key file {path}", "made"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # regardless of the umask
        file.write(f"{key.secret_text()}\n")
    file_name = os.path.abspath(path)
    trusted = f"$(cat {file_name})" if shared else key.public_text()
    fingerprint = VerifyKey.parse(key.public_text()).fingerprint
    if out.json:
        public = None if shared else trusted
        out.record({"signing_key": file_name, "trusted_key": public, "fingerprint": fingerprint})
        return
    out.line(f"S3CACHE_SIGNING_KEY={file_name}  # where entries are saved")
    out.line(f'S3CACHE_TRUSTED_KEYS="{trusted}"  # where they are read')
    out.line(f"# to revoke it: S3CACHE_REVOKED={fingerprint}")
