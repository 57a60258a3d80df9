"""``s3cache run``, ``check``, ``warm`` and ``bench``: run a program, and say how it went."""

from __future__ import annotations

import os
import re
import secrets
import sys
from importlib.metadata import entry_points
from typing import Any

from typer import Argument, Option

from s3cache.cli._options import URL, Output, duration_s, size_bytes
from s3cache.errors import ConfigError
from s3cache.records import JOB, job_here
from s3cache.settings import Settings
from s3cache.store import parse_url
from s3cache.util.text import counted

PROGRAM: list[str] = Argument(
    ...,
    metavar="PROGRAM [ARGUMENT]...",
    help="What python runs too, and arguments for it.",
)
MODULE: bool = Option(False, "-m", help="A module, not a script.")
COMMAND: bool = Option(False, "-c", help="Code, not a script.")
STEPS: int | None = Option(
    None,
    metavar="N",
    help="End it after so many optimizer steps since it first compiled.",
    min=1,
    max=1000,
)


def _arguments(program: list[str], *, module: bool, command: bool) -> list[str]:
    """Return the arguments by which Python runs a program."""
    if module and command:
        raise ConfigError("option -c", "is given beside -m", "leave one of them out")
    kind = ["-m"] if module else ["-c"] if command else []
    if not kind and program[0] != "-" and not os.path.exists(program[0]):
        raise ConfigError(f"script {program[0]}", "is not there", "name another, or give -m or -c")
    return [*kind, *program]


def run(
    program: list[str] = PROGRAM,
    url: str | None = URL,
    as_json: bool = Option(False, "--json", help="End with an object of JSON in place of a line."),
    module: bool = MODULE,
    command: bool = COMMAND,
) -> None:
    """Run a Python program with s3cache turned on, unchanged.

    A program is anything that python runs: a script, a .pyc, a directory or zip file with a
    __main__, - for standard input, a module or code. Everything after its name belongs to the
    program. Python runs it in this process, with environment variables that turn s3cache on, also
    in the processes that it starts. Each process that compiles ends with one line that counts its
    hits and misses (S3CACHE_SUMMARY=0: no line).
    """
    arguments = _arguments(program, module=module, command=command)
    settings, of_store = Settings.load(url)
    if settings.url is not None:
        parse_url(settings.url, **of_store)
    settings.trust_policy()
    _check_autoload()
    environment = {**os.environ, "S3CACHE_AUTOLOAD": "1"}
    if url is not None:
        environment["S3CACHE_URL"] = url
    if as_json:
        environment["S3CACHE_SUMMARY"] = "json"
    environment.setdefault("S3CACHE_SUMMARY", "1")
    if not job_here():  # then each rank is one of a job already
        environment[JOB] = secrets.token_hex(4)
    os.execve(  # noqa: S606 - it is what it was asked to run
        sys.executable, [sys.executable, *_interpreter_options(), *arguments], environment
    )


def _check_autoload() -> None:
    """Raise ConfigError if ``import torch`` in the program would not turn s3cache on."""
    switch = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    if os.environ.get(switch, "1") != "1":
        raise ConfigError(
            f"environment variable {switch}",
            f"is {os.environ[switch]!r}, and torch then loads no s3cache",
            "unset it, or call s3cache.enable() in the program",
        )
    if not entry_points(group="torch.backends", name="s3cache"):
        raise ConfigError(
            "s3cache",
            "is not installed, only on the path: torch does not find it",
            "install it (pip install torch-s3cache), or call s3cache.enable() in the program",
        )


def _interpreter_options() -> list[str]:
    """Return the options that Python itself was started with, such as ``-u`` and ``-X``."""
    *options, command = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if command != sys.argv[0]:  # not a script, but the argument of -m: `-u -m s3cache`
        last = re.match("-([A-Za-z]*?)[cm]", command if command[0] == "-" else options.pop())
        if last is not None and last[1]:
            options.append(f"-{last[1]}")
    return options


_ENDS = {
    "itself": "ended by itself",
    "steps": "was ended: its optimizers have stepped (--steps)",
    "graphs": "was ended: so many graphs were compiled (--graphs)",
    "quiet": "was ended: it compiled nothing more (--quiet)",
    "timeout": "was ended: its time was over (--timeout)",
    "interrupted": "was ended: interrupted",
}


def check(
    out: Output,
    program: list[str] = PROGRAM,
    module: bool = MODULE,
    command: bool = COMMAND,
    quiet: str = Option(
        "30s", metavar="TIME", help="End it when it has compiled nothing for so long; 0: never."
    ),
    steps: int | None = STEPS,
    graphs: int | None = Option(None, metavar="N", help="End it after so many graphs.", min=1),
    timeout: str = Option(
        "2h", metavar="TIME", help="End it after that time in any case; 0: never."
    ),
) -> int:
    """Run a program, and report for each graph that it compiles whether it can be cached.

    The program compiles as usual, in a process of its own. No bucket is needed or read, and nothing
    is written to one, unless the program itself turns s3cache on. If a graph cannot be cached, all
    reasons are listed, with the line in the program and a fix. Once the program has compiled
    something and then nothing for --quiet, it is ended with SIGTERM, as by a scheduler. So training
    that takes days ends after its first steps, and saves nothing. Exits with 1 if a graph cannot be
    cached as a whole, or nothing was compiled.
    """
    from s3cache.manage.programs import check_program

    found = check_program(
        _arguments(program, module=module, command=command),
        quiet_s=duration_s("--quiet", quiet) or None,
        steps=steps,
        graphs=graphs,
        timeout_s=duration_s("--timeout", timeout) or None,
        to_stderr=out.json,
    )
    end, code = str(found.program["end"]), found.program["exit_code"]
    if out.json:
        out.record(found.as_dict())
    else:
        out.note(f"the program {_ENDS[end]}{f' with {code}' if code else ''}")
        nothing = "no graph: the program called nothing that torch.compile compiles by Inductor"
        out.text(str(found) if found.graphs else nothing)
    if end == "interrupted":
        return 130
    return 0 if found.cacheable else 1


def warm(
    out: Output,
    command: list[str] = Argument(..., metavar="-- COMMAND...", help="The job, as a shell has it."),
    steps: int | None = STEPS,
    quiet: str = Option("60s", metavar="TIME", help="End it when it compiled nothing for so long."),
    timeout: str = Option("2h", metavar="TIME", help="End it after that time in any case."),
    url: str | None = URL,
) -> int:
    """Run a job until it compiles nothing more and everything is uploaded, then end it.

    This is for a build step, or for one machine before a fleet starts: then the remote has what the
    job compiled. The cache is turned on in all processes of the job, which are ended with SIGTERM.
    Steps of an optimizer that is itself compiled cannot be counted, and inference has none: there
    --quiet ends the job. Exits with 1 if the time was over, the job failed, something is not
    uploaded, or the job compiled nothing at all.
    """
    from s3cache.manage import programs

    done = programs.warm(
        command,
        quiet_s=duration_s("--quiet", quiet),
        timeout_s=duration_s("--timeout", timeout),
        steps=steps,
        url=url,
    )
    exit_code = 130 if done["end"] == "interrupted" else 0 if done["is_warm"] else 1
    if out.json:
        out.record(done)
        return exit_code
    code, left = done["exit_code"], done["to_upload"]
    out.note(f"the job {_ENDS[done['end']]}{f' with {code}' if code else ''}")
    if left:
        out.note(f"{left} not uploaded")
    if done["hits"] or done["misses"] or done["bypasses"]:
        out.note(
            f"{counted(done['hits'], 'graph')} hit, {done['misses']} missed, of which "
            f"{done['added']} are in the cache now; {done['bypasses']} bypassed"
        )
    else:
        out.note(
            "nothing was compiled, so nothing is warm: the job called nothing that torch.compile "
            "compiles by Inductor, or turned the cache off; s3cache check says what it compiles"
        )
    return exit_code


def bench(
    out: Output,
    storage_only: bool = Option(
        False, "--storage-only", help="Compile nothing; torch is not needed."
    ),
    rounds: int = Option(3, metavar="N", help="Cold and warm starts, each N times.", min=1),
    size: str = Option("32MB", metavar="SIZE", help="Of a large object."),
    timeout: str = Option("5min", metavar="TIME", help="Leave out tries that would take longer."),
    url: str | None = URL,
) -> int:
    """Measure your own bucket: its storage, and a first step compiled and hit through it.

    A warm start is the first step of a small model in a fresh process with an empty disk; a cold
    start compiles it there. Times are medians of all tries. Everything is written below a prefix of
    its own, s3cache-bench-..., and removed at the end. If the credentials may not delete, the
    output says what is left. Exits with 1 if the warm start did not hit.
    """
    from s3cache.manage import programs

    with out.progress("measured") as advance:
        found = programs.bench(
            url,
            size=size_bytes("--size", size),
            rounds=0 if storage_only else rounds,
            timeout_s=duration_s("--timeout", timeout),
            advance=advance,
        )
    if out.json:
        out.record(found)
    else:
        _show_bench(out, found)
    return 0 if storage_only or found["warm_start"]["hits"] else 1


def _show_bench(out: Output, found: dict[str, Any]) -> None:
    rows = []
    for name, times in found["storage"].items():
        speed = f"{times['mb_s']:.0f} MB/s" if "mb_s" in times else ""
        median = f"{times['median_s'] * 1000:.1f} ms"
        rows.append((name.replace("_", " "), median, speed, str(len(times["seconds"]))))
    out.table(["storage", ">median", ">speed", ">tries"], rows)
    if start := found.get("warm_start"):
        starts = [
            (name, f"{start[name]['median_s']:.2f} s", str(len(start[name]["seconds"])))
            for name in ("cold", "warm")
        ]
        out.table([f"first step, on {start['device']}", ">median", ">tries"], starts)
        out.line(f"the warm start is {start['ratio']:.1f}x faster")
        if not start["hits"]:
            why = ", ".join([*start["misses"], *start["bypasses"]]) or "it looked nothing up"
            out.line(f"the warm start did not hit: {why} (see s3cache doctor)")
    if found["left"]:
        out.line(
            f"{counted(found['left'], 'object')} left below {found['prefix']}: these credentials "
            "may not delete; the operator of the bucket may remove what is there"
        )
    else:
        out.note(f"what was written is removed ({counted(found['removed'], 'object')})")
