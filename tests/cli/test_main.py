"""What all commands have in common: how they start, end, and say what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import s3cache
from tests.support.imports import modules_after

if TYPE_CHECKING:
    from tests.cli.commands import Call

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [["--help"], ["version"]])
def test_a_command_imports_nothing_that_it_does_not_need(arguments: list[str]) -> None:
    """That is why ``--help`` takes a tenth of a second."""
    code = f"""
import contextlib, io
from s3cache.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main({arguments}) == 0
"""
    heavy = {"torch", "boto3", "botocore", "aioboto3", "aiohttp", "msgpack", "numpy", "zstandard"}
    assert modules_after(f"exec({code!r})").isdisjoint(heavy)


def test_run_has_nothing_of_the_command_line_in_its_process(tmp_path: Path) -> None:
    """The program's process stays as it would be; neither Typer nor Rich takes its time."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('typer' in sys.modules, 'rich' in sys.modules)")
    run = [sys.executable, "-m", "s3cache", "run", str(script)]
    environment = {**os.environ, "S3CACHE_LOCAL": "0", "S3CACHE_SUMMARY": "0"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_installed_command_is_the_same_program(tmp_path: Path) -> None:
    """Its own directory is not on the path of what it runs."""
    declared = re.search(
        r'^s3cache = "(\S+):(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert declared is not None
    module, function = declared.groups()
    script = tmp_path / "bin" / "s3cache"
    script.parent.mkdir()
    (script.parent / "helper.py").write_text("")
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    shows = "import sys, importlib.util; print(sys.path[0] == '', importlib.util.find_spec"
    done = subprocess.run(
        [sys.executable, str(script), "run", "-c", f"{shows}('helper'))"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "S3CACHE_LOCAL": "0", "S3CACHE_SUMMARY": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True None\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing command"),
        (["walk"], "No such command 'walk'"),
        (["version", "--what"], "--what"),
        (["version", "more"], "more"),
        (["keygen"], "NAME"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(
    call: Call, arguments: list[str], said: str
) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("s3cache: error: ")
    assert len(done.err.splitlines()) == 1
    assert said.lower() in done.err.lower()


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2@bucket/prefix",
        "s4://AKIA:hunter2@bucket/prefix",
        "s3:AKIA:hunter2@bucket",
        "s3://bucket/prefix?secret_key=hunter2",
        "s3//bucket/?access_key=hunter2@x",
        "https://user:hunter2@server/bucket",
    ],
)
def test_no_secret_of_a_url_is_repeated(call: Call, url: str) -> None:
    """However it is misspelt, and wherever it was put by mistake."""
    for arguments in (["version", url], [url], ["version", f"--{url}"]):
        done = call(*arguments)
        assert done.code == 2
        assert "hunter2" not in done.out + done.err


def test_the_version_is_an_option_too(call: Call) -> None:
    assert call("--version").out == f"s3cache {s3cache.__version__}\n"


def test_help_lists_all_commands_and_what_the_exit_codes_mean(call: Call) -> None:
    done = call("--help")
    assert done.code == 0
    for word in ("run", "version", "keygen", "Exit codes", "S3CACHE_URL"):
        assert word in done.out


def test_a_shell_may_ask_how_a_word_goes_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_S3CACHE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "s3cache d")
    monkeypatch.setenv("COMP_CWORD", "1")
    done = call()
    assert (done.code, done.out.split()) == (0, ["doctor", "du"])
