"""What all commands have in common: how they start, end, and say what is wrong."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra.docs.commands import reference
from tests.cli.commands import Call
from tests.support.imports import modules_after
from tests.support.shelves import Shelf
from tests.support.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "commands.md"


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["explain", "untrusted"]])
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


def test_the_installed_command_is_the_same_program(tmp_path: Path) -> None:
    """Its own directory is not on the path of what it runs, and Typer is not in that process."""
    declared = re.search(
        r'^s3cache = "(\S+):(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert declared is not None
    module, function = declared.groups()
    script = tmp_path / "bin" / "s3cache"
    script.parent.mkdir()
    (script.parent / "helper.py").write_text("")
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    shows = (
        "import sys; from importlib.util import find_spec; "
        "print(sys.path[0] == '', find_spec('helper'), 'typer' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, str(script), "run", "-c", shows],
        env={**os.environ, "PYTHONPATH": str(ROOT), "S3CACHE_LOCAL": "0", "S3CACHE_SUMMARY": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True None False\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("", 2, "Missing command"),
        ("walk", 2, "No such command 'walk'"),
        ("version --what", 2, "--what"),
        ("version more", 2, "more"),
        ("keygen", 2, "NAME"),
        ("ls", 2, "has no URL; give --url, or set S3CACHE_URL"),
        ("ls --url file:///nowhere/at/all?create=false", 3, "/nowhere/at/all"),
        ("ls --url ftp://x", 2, "scheme 'ftp': is not known"),
        ("ls --url {url} --older soon", 2, "'soon' is no time"),
        ("ls --url {url} --min-size big", 2, "'big' is no size"),
        ("ls --url {url} --sort colour", 2, "colour"),
        ("ls --url {url} --limit 0", 2, "--limit"),
        ("ls s3://AKIA:hunter2@bucket", 2, "s3://…"),
        ("ls --url s3://AKIA:hunter2@bucket", 2, "user name, a password"),
        ("prefetch --url {url}", 2, "has no keys"),
        ("prefetch A/B --url {url}", 2, "cache key 'A/B'"),
        ("prefetch --manifest /nowhere --url {url}", 2, "manifest /nowhere"),
        ("pull", 2, "has no URL"),
        ("push", 2, "has no URL"),
        ("mirror {url}", 2, "TARGET"),
        ("mirror {url} s3://AKIA:hunter2@bucket", 2, "user name, a password"),
        ("mirror file:///nowhere?create=false {url}", 3, "/nowhere"),
        ("gc --delete --url {url}", 2, "has no condition"),
        ("gc --delete --untrusted --url {url}", 2, "set trusted_keys"),
        ("bench", 2, "has no URL"),
        ("warm -- true", 2, "has no URL"),
        ("warm --url {url}?create=1 -- /no/such/program", 2, "/no/such/program"),
        ("check -m -c x", 2, "given beside -m"),
        ("check /no/such/script.py", 2, "script.py: is not there"),
        ("check", 2, "PROGRAM"),
        ("report", 2, "there are none in"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    call: Call, shelf: Shelf, arguments: str, code: int, said: str
) -> None:
    """Nothing is done then, and no secret of a URL is repeated."""
    name = shelf.add("a")
    done = call(*arguments.format(url=shelf.url).split())
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("s3cache: error: ")
    assert len(done.err.splitlines()) == 1, done.err
    assert said.lower() in done.err.lower()
    assert "hunter2" not in done.err
    assert shelf.names == {name}


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2@bucket/prefix",
        "s4://AKIA:hunter2@bucket/prefix",
        "s3:AKIA:hunter2@bucket",
        "s3://bucket/prefix?secret_key=hunter2",
        "s3//bucket/?access_key=hunter2@x",
        "https://user:hunter2@server/bucket",
        "s3://bucket/x?session_token=hunter2&region=eu",
        "AKIA:hunter2@bucket",
        "hunter2://user@bucket",
        "http://host/object?X-Amz-Signature=hunter2",
    ],
)
def test_no_secret_of_a_url_is_repeated(call: Call, url: str) -> None:
    """However it is misspelt, and wherever it was put by mistake."""
    for arguments in (["version", url], [url], ["version", f"--{url}"]):
        done = call(*arguments)
        assert done.code == 2
        assert "hunter2" not in done.out + done.err


def test_a_request_that_is_tried_again_is_shown_on_a_terminal(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "S3CACHE_LOCAL_DIR": str(tmp_path),
        "S3CACHE_RETRY_ATTEMPTS": "2",
    }
    url = "s3://bucket/prefix?endpoint_url=http://127.0.0.1:9&region=us-east-1"
    command = [sys.executable, "-m", "s3cache", "ls", "--url", url]
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as said, open(theirs, "wb") as stderr:
        done = subprocess.run(command, env=environment, stderr=stderr, timeout=LONG_S, check=False)
        again, error = said.read(1 << 16).decode().splitlines()
    assert done.returncode == 3
    assert again.endswith("; it is tried again")
    assert error.startswith("s3cache: error: list")


# -- docs/commands.md


def test_the_page_is_up_to_date() -> None:
    """If not: ``make commands``."""
    assert PAGE.read_text(encoding="utf-8") == reference()
