"""What is shown: for people and programs, and never what must not be."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from s3cache.cli._options import Output, redacted
from s3cache.errors import ConfigError
from tests.support.shelves import Shelf


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/prefix is not there",
        "give --url, or set S3CACHE_URL",
        "file:///nowhere/at/all",
        "s3://bucket/p?endpoint_url=https://minio&region=eu-west-1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_nothing_that_a_terminal_obeys_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a new line in what others wrote make a line of its own, but in text of ours."""
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


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("json", "terminal"), [(False, True), (True, True), (False, False)])
def test_progress_is_for_terminals(
    json: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Output(json).progress("copied") as advance:
        advance(1)
        advance(2)
    assert stream.getvalue() == ("1 copied\r3 copied\r\x1b[K" if terminal and not json else "")


def test_json_is_one_line_whatever_there_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {
        "bytes": b"\xff",
        "set": {3},
        "text": "ü\n",
        4: (1, None),
        "x": ConfigError("a", "b", "c"),
    }
    Output(json=True).record(odd)
    assert capsys.readouterr().out == (
        '{"bytes": "ff", "set": [3], "text": "\\u00fc\\n", "4": [1, null], "x": "a: b; c"}\n'
    )


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    """``s3cache ls | head -1``."""
    shelf = Shelf(tmp_path / "remote")
    for number in range(20):
        shelf.put(f"v1/00{number % 10}/{'k' * 100}{number}.0", b"x")
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
