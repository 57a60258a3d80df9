"""Behaviour that all commands share, and the commands doctor and stats."""

from __future__ import annotations

import io
import os
import platform
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

import s3cache
from infra.docs.commands import reference
from s3cache.cli._options import Output, work_on
from s3cache.errors import ConfigError
from s3cache.manage import BatchResult, Scan
from s3cache.util.text import redacted
from tests.cli.commands import Call, save
from tests.support.marks import slow
from tests.support.scripts import modules_after, python
from tests.support.shelves import Shelf
from tests.support.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "commands.md"


def test_a_command_imports_nothing_that_it_does_not_need() -> None:
    """That is why ``--help`` takes a tenth of a second."""
    code = """
import contextlib, io
from s3cache.cli import main
for arguments in (["--help"], ["--version"], ["explain", "untrusted"]):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(arguments) == 0
"""
    heavy = {"torch", "boto3", "botocore", "aioboto3", "aiohttp", "msgpack", "numpy", "zstandard"}
    assert modules_after(f"exec({code!r})").isdisjoint(heavy)


def test_programs_run_without_typer_and_other_commands_say_what_to_install(tmp_path: Path) -> None:
    """A job does not need the extra ``cli``. Arguments after the program's name are its own."""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "S3CACHE_LOCAL": "0"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "s3cache", *arguments, env=variables, cwd=tmp_path)

    shows = "import os, sys; print(os.environ['S3CACHE_SUMMARY'], sys.argv)"
    options = ["--url", "memory://x", "--json", "-c"]
    done = run("run", *options, shows, "--json", "-m", "--", "x")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "json ['-c', '--json', '-m', '--', 'x']\n"
    install = "pip install 'torch-s3cache[cli]'"
    for arguments, message in (
        (["ls", "--url", "memory://x"], install),
        (["run", "--what", "x.py"], "unrecognized arguments: --what"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert message in line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("", 2, "Missing command"),
        ("walk", 2, "No such command 'walk'"),
        ("stats --what", 2, "--what"),
        ("keygen", 2, "NAME"),
        ("ls", 2, "has no URL; give --url, or set S3CACHE_URL"),
        ("ls --url file:///nowhere/at/all?create=false", 3, "/nowhere/at/all"),
        ("ls --url ftp://x", 2, "scheme 'ftp': is not known"),
        ("ls --url {url} --older soon", 2, "'soon' is not a time"),
        ("ls --url {url} --min-size big", 2, "'big' is not a size"),
        ("ls s3://AKIA:hunter2@bucket", 2, "s3://…"),
        ("rm --url {url} --delete", 2, "has no key and no condition"),
        ("pull A/B --url {url}", 2, "cache key 'A/B'"),
        ("push", 2, "has no URL"),
        ("mirror {url} s3://AKIA:hunter2@bucket", 2, "user name, a password"),
        ("mirror file:///nowhere?create=false {url}", 3, "/nowhere"),
        ("rm --delete --untrusted --url {url}", 2, "set trusted_keys"),
        ("warm -- true", 2, "has no URL"),
        ("warm --url {url}?create=1 -- /no/such/program", 2, "/no/such/program"),
        ("check -m -c x", 2, "cannot be used with -m"),
        ("check /no/such/script.py", 2, "script.py: does not exist"),
        ("report", 2, "there are none in"),
    ],
)
def test_a_command_that_cannot_work_prints_one_clear_line(
    call: Call, shelf: Shelf, arguments: str, code: int, message: str
) -> None:
    """No entry is changed, and no secret of a URL is repeated."""
    name = shelf.add("a")
    done = call(*arguments.format(url=shelf.url).split())
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("s3cache: error: ")
    assert len(done.err.splitlines()) == 1, done.err
    assert message.lower() in done.err.lower()
    assert "hunter2" not in done.err
    assert shelf.names == {name}


def test_no_secret_of_a_url_is_repeated(call: Call) -> None:
    """This holds for misspelt URLs, and for URLs in the wrong place."""
    for url in (
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
    ):
        for arguments in (["ls", url], [url], ["ls", f"--{url}"]):
            done = call(*arguments)
            assert done.code == 2
            assert "hunter2" not in done.out + done.err
    text = "give --url: s3://bucket/p?endpoint_url=https://minio&region=eu-west-1, file:///at/all"
    assert redacted(text) == text


@slow
def test_a_retried_request_is_shown_on_a_terminal(tmp_path: Path) -> None:
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
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "wb") as stderr:
        done = subprocess.run(command, env=environment, stderr=stderr, timeout=LONG_S, check=False)
        again, error = terminal.read(1 << 16).decode().splitlines()
    assert done.returncode == 3
    assert again.endswith("; it is tried again")
    assert error.startswith("s3cache: error: list")


# -- docs/commands.md


@pytest.mark.needs
def test_the_page_is_up_to_date() -> None:
    """``make commands`` updates it."""
    assert PAGE.read_text(encoding="utf-8") == reference()


# -- output


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Newlines are escaped too, except by ``Output.text``, which prints our own text."""
    out, foreign = Output(json=False), "a\x1b[2Jb\x07\r\x9b\u202ec\nnext äöü → 3 µs"
    out.line(foreign)
    out.note(foreign)
    out.text(foreign)
    out.table(["name"], [[foreign]])
    written = capsys.readouterr()
    escaped = "a\\x1b[2Jb\\x07\\r\\x9b\\u202ec"
    one_line = f"{escaped}\\nnext äöü → 3 µs"
    assert written.err == f"{one_line}\n"
    assert written.out.startswith(f"{one_line}\n{escaped}\nnext äöü → 3 µs\n")
    assert written.out.count(one_line) == 2


def test_progress_is_shown_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(_: object, advance: Callable[[], None]) -> BatchResult:
        advance()
        advance()
        return BatchResult()

    for json, terminal in ((False, True), (True, True), (False, False)):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        work_on(Output(json), "copied", cast("Scan", None), work)
        assert stream.getvalue() == ("1 copied\r2 copied\r\x1b[K" if terminal and not json else "")


def test_json_of_any_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"bytes": b"\xff", "set": {3}, "text": "ü\n", 4: (1, None), "x": ConfigError(*"abc")}
    Output(json=True).record(odd)
    assert capsys.readouterr().out == (
        '{"bytes": "ff", "set": [3], "text": "\\u00fc\\n", "4": [1, null], "x": "a: b; c"}\n'
    )


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """``s3cache ls | head -1``."""
    shelf = Shelf(tmp_path / "remote")
    for number in range(20):
        shelf.put(f"v1/{number % 10}/{'k' * 100}{number}.0", b"x")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "s3cache", "ls", "--url", shelf.url],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


# -- doctor


def test_doctor_exits_with_1_if_it_finds_a_fault(
    call: Call, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory that a local tier refuses is a fault (tests/trust/test_directories.py)."""
    done = call("doctor", "--url", shelf.url, "--no-programs")
    assert done.code == 0
    assert "ok       list: allowed" in done.out
    assert "warning  trust: no key is trusted" in done.out
    assert "fix: s3cache keygen NAME, and docs/trust.md (s3cache explain trust)\n" in done.out
    assert "0 faults, 1 warning\n" in done.err
    assert shelf.names == set()
    tmp_path.chmod(0o777)
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path))
    done = call("doctor", "--no-programs")
    assert done.code == 1
    (fix,) = (line for line in done.out.splitlines() if f"chmod go-w {tmp_path}" in line)
    assert fix.endswith(" (s3cache explain local-directory ConfigError)")
    checks = call("doctor", "--no-programs", "--json").lines
    assert [each["code"] for each in checks if each["verdict"] == "fault"] == ["ConfigError"]
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "soon")
    done = call("doctor", "--json")  # nothing else is checked
    assert (done.code, len(done.lines)) == (1, 1)
    assert "S3CACHE_LOOKUP_TIMEOUT_S" in done.json["found"]


def test_stats_count_the_entries_of_both_tiers(call: Call, shelf: Shelf) -> None:
    shelf.add("a")
    shelf.add("a", variant="v", first=False)
    save(shelf.url)
    found = call("stats", "--url", shelf.url, "--json").json
    assert (found["remote"]["entries"], found["remote"]["keys"]) == (3, 2)
    assert [found["local"][each] for each in ("entries", "keys", "to_upload")] == [1, 1, 0]
    assert found["local"]["bytes"] > 0
    assert "remote" not in call("stats", "--local", "--url", shelf.url, "--json").json
    text = call("stats", "--url", shelf.url).out
    assert "remote:\n  entries  3\n" in text


def test_version_prints_what_a_bug_report_needs(call: Call) -> None:
    done = call("--version")
    assert done.code == 0
    found = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert found["s3cache"] == s3cache.__version__
    assert platform.python_version() in found["python"]
    assert {"torch", "botocore", "platform", "libc", "zstandard"} <= set(found)
    assert found["typer"][0].isdigit()
