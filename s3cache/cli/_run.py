"""The command ``run``. It needs no Typer, which jobs do not have."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from importlib import metadata
from typing import NoReturn

from s3cache.errors import ConfigError
from s3cache.records import JOB, job_here
from s3cache.settings import Settings
from s3cache.store import parse_url


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("s3cache run", message, "see s3cache run --help")


def run_without_typer(arguments: list[str]) -> NoReturn:
    """Parse the arguments after ``run`` as Typer would, and run the program."""
    parser = _Parser("s3cache run", allow_abbrev=False)
    parser.add_argument("--url", metavar="URL", help="where the cache is")
    parser.add_argument("--json", action="store_true", help="print the summary as a JSON object")
    parser.add_argument("-m", dest="module", action="store_true", help="a module, not a script")
    parser.add_argument("-c", dest="command", action="store_true", help="code, not a script")
    parser.add_argument("program", metavar="PROGRAM [ARGUMENT]...", nargs=argparse.REMAINDER)
    options = vars(parser.parse_args(arguments))
    program = options.pop("program")
    if program[:1] == ["--"]:
        del program[0]
    if not program:
        parser.error("has no program")
    run_program(program, **options)


def run_program(
    program: list[str], *, url: str | None, json: bool, module: bool, command: bool
) -> NoReturn:
    """Replace this process by Python with the program, and with s3cache turned on."""
    arguments = arguments_of(program, module=module, command=command)
    settings, of_store = Settings.load(url)
    if settings.url is not None:
        parse_url(settings.url, **of_store)
    settings.trust_policy()
    switch = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # else `import torch` would not turn s3cache on
    if os.environ.get(switch, "1") != "1":
        raise ConfigError(
            f"environment variable {switch}",
            f"is {os.environ[switch]!r}, which keeps torch from loading s3cache",
            "unset it, or call s3cache.enable() in the program",
        )
    if not metadata.entry_points(group="torch.backends", name="s3cache"):
        raise ConfigError(
            "s3cache",
            "is on the path, but is not installed: torch does not find it",
            "install it (pip install torch-s3cache), or call s3cache.enable() in the program",
        )
    environment = {**os.environ, "S3CACHE_AUTOLOAD": "1"}
    if url is not None:
        environment["S3CACHE_URL"] = url
    if json:
        environment["S3CACHE_SUMMARY"] = "json"
    environment.setdefault("S3CACHE_SUMMARY", "1")
    if not job_here():  # else the processes already belong to a job
        environment[JOB] = secrets.token_hex(4)
    os.execve(  # noqa: S606 - it is what it was asked to run
        sys.executable, [sys.executable, *_interpreter_options(), *arguments], environment
    )


def arguments_of(program: list[str], *, module: bool, command: bool) -> list[str]:
    """Return the arguments with which Python runs a program."""
    if module and command:
        raise ConfigError("option -c", "cannot be used with -m", "omit one of them")
    kind = ["-m"] if module else ["-c"] if command else []
    if not kind and program[0] != "-" and not os.path.exists(program[0]):
        raise ConfigError(f"script {program[0]}", "does not exist", "give another, or -m or -c")
    return [*kind, *program]


def _interpreter_options() -> list[str]:
    """Return the options of the Python interpreter, such as ``-u`` and ``-X``."""
    *options, command = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if command != sys.argv[0]:  # not a script, but the argument of -m: `-u -m s3cache`
        last = re.match("-([A-Za-z]*?)[cm]", command if command[0] == "-" else options.pop())
        if last is not None and last[1]:
            options.append(f"-{last[1]}")
    return options
