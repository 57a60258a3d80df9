"""What servers and entries say is shown in one line, and nothing obeys it."""

from __future__ import annotations

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

# Of each kind: ESC, C1 (0x9b begins a sequence too), direction, separators of lines, BEL, a page.
ORDERS = "\x1b]0;owned\x07\x9b2J\u202e\u2066\u2028\x85\r\n\x0c\x00\x7f"
FORGED = f"good{ORDERS}forged line"


def test_every_error_is_one_line_that_can_be_printed() -> None:
    for name in errors.__all__:
        kind: Any = getattr(errors, name)
        if issubclass(kind, errors.ConfigError):
            error = kind(FORGED, FORGED, FORGED)
        elif issubclass(kind, errors.TruncatedError):
            error = kind(FORGED, 1, 2)
        elif issubclass(kind, (errors.CorruptError, errors.UntrustedError)):
            error = kind(FORGED, FORGED)
        elif issubclass(kind, errors.StoreError):
            error = kind(FORGED, op="get", store=FORGED, key=FORGED, attempts=2)
        else:
            error = kind(FORGED)
        assert str(error).isprintable()
        assert "forged line" in str(error)


@pytest.mark.parametrize("topic", [None, *get_args(Topic)])
def test_no_record_of_a_log_has_orders_for_a_terminal(topic: Any) -> None:
    """Whatever is logged, a traceback of a library's error too; lines of ours stay lines."""
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


async def test_what_a_server_says_reaches_no_log_as_it_is(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    said = "denied&#x9b;2J\u202e forged line"  # what XML lets through
    server.answer = lambda request: error_reply(403, "AccessDenied\u202e\x9b", said)

    def look_up() -> None:
        options: dict[str, Any] = {**KEYS, "endpoint_url": server.url, "local": False}
        # However slow this machine is, the answer comes before the lookup is given up.
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
    "command", ["ls", "ls --long", "inspect", "verify", "du", "mirror", "rm --dry-run"]
)
def test_metadata_forges_no_line_of_a_command(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program's entry has as many lines, whatever it calls itself."""
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


def test_pages_show_no_orders_either() -> None:
    assert escape(FORGED).replace("\n", "").isprintable()
    assert escape("<a>\u202e") == "&lt;a&gt;\\u202e"
