"""Text of servers and entries is shown in one line, without control characters."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path
from typing import Any, get_args

import pytest

from s3cache import errors
from s3cache.cache import Cache, Miss
from s3cache.cli import main
from s3cache.util.logs import Topic, logger_of
from s3cache.util.text import escape
from tests.support.caching import KEY
from tests.support.processes import KEYS
from tests.support.scripted import ScriptedServer, error_reply
from tests.support.shelves import Shelf

# Each kind: ESC, C1 (0x9b begins a sequence too), direction, line separators, BEL, form feed.
CONTROLS = "\x1b]0;owned\x07\x9b2J\u202e\u2066\u2028\x85\r\n\x0c\x00\x7f"
FORGED = f"good{CONTROLS}forged line"


def test_every_error_is_one_line_that_can_be_printed() -> None:
    where = {"op": "get", "store": FORGED, "key": FORGED, "attempts": 2}
    for name in errors.__all__:
        kind: Any = getattr(errors, name)
        if issubclass(kind, errors.StoreError):
            error = kind(FORGED, **where)
        else:
            arguments = {"ConfigError": 3, "CorruptError": 2, "UntrustedError": 2}.get(name, 1)
            is_cut = issubclass(kind, errors.TruncatedError)
            error = kind(FORGED, 1, 2) if is_cut else kind(*[FORGED] * arguments)
        assert str(error).isprintable()
        assert "forged line" in str(error)


@pytest.mark.parametrize("topic", [None, "recall", *get_args(Topic)])
def test_no_log_record_has_control_characters(topic: Any) -> None:
    """This includes tracebacks of libraries' errors; newlines of our own text stay."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logger_of(topic)
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(FORGED)
        except ValueError as exc:
            logger.warning("%s says\n%s", exc, 5, exc_info=True)
        logger.warning("%d of %s", 1, {"a": 2})
    finally:
        logger.removeHandler(handler)
    written = stream.getvalue()
    assert written.replace("\n", "").isprintable()
    assert written.startswith("good\\x1b]0;owned\\x07\\x9b2J\\u202e")
    assert "ValueError: good\\x1b" in written
    assert "\n5\nTraceback" in written
    assert written.endswith("1 of {'a': 2}\n")


async def test_text_of_a_server_is_escaped_in_logs(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = "denied&#x9b;2J\u202e forged line"  # characters that XML allows
    server.answer = lambda request: error_reply(403, "AccessDenied\u202e\x9b", message)

    def look_up() -> None:
        options: dict[str, Any] = {**KEYS, "endpoint_url": server.url, "local": False}
        # Even on a slow machine, the answer comes before the lookup times out.
        with Cache.open("s3://bucket/p", **options, lookup_timeout_s=120.0) as cache:
            found = cache.lookup(KEY)
            assert isinstance(found, Miss)
            cache.stats()

    await asyncio.to_thread(look_up)
    assert caplog.records
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "forged line" in record.getMessage() or "AccessDenied" in record.getMessage()


@pytest.mark.parametrize(
    "command", ["ls", "ls --long", "inspect", "verify", "stats --by=tag", "mirror", "rm --dry-run"]
)
def test_metadata_forges_no_line_of_a_command(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry with forged metadata has as many lines as one with good metadata."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))
    shelf = Shelf(tmp_path / "remote")
    key = f"a{'0' * 8}-{KEY}"
    arguments = command.split()
    arguments += {
        "inspect": [key, "--url", shelf.url],
        "mirror": [shelf.url, f"file://{tmp_path}/other?create=1"],
        "rm": ["--all", "--url", shelf.url],
    }.get(arguments[0], ["--url", shelf.url])
    counts = []
    for word in ("good", FORGED):
        shelf.add(key, torch=word, tag=word, device=word)
        capsys.readouterr()
        main([*arguments])
        written = capsys.readouterr()
        lines = (written.out + written.err).split("\n")
        assert all(line.isprintable() for line in lines)
        counts.append(len(lines))
    assert counts[0] == counts[1] > 1


def test_control_characters_are_escaped_in_pages() -> None:
    assert escape(FORGED).replace("\n", "").isprintable()
    assert escape("<a>\u202e") == "&lt;a&gt;\\u202e"
