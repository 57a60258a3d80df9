"""``s3cache stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache import Cache, frame

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.commands import Call
    from tests.support.shelves import Shelf


def test_both_tiers_are_counted(call: Call, shelf: Shelf) -> None:
    shelf.add("a")
    shelf.add("a", variant="v", first=False)
    with Cache.open(shelf.url) as cache:
        cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    found = call("stats", "--url", shelf.url, "--json").json
    assert (found["remote"]["entries"], found["remote"]["keys"]) == (3, 2)
    local = found["local"]
    assert (local["entries"], local["keys"], local["to_upload"]) == (1, 1, 0)
    assert call("pull", "--url", shelf.url).code == 0  # the others; of "k" its first one too
    local = call("stats", "--local", "--json").json["local"]
    assert (local["entries"], local["keys"]) == (4, 2)
    assert found["local"]["bytes"] > 0
    assert "remote" not in call("stats", "--local", "--url", shelf.url, "--json").json
    text = call("stats", "--url", shelf.url).out
    assert f"remote: {shelf.url}\n  3 entries under 2 keys" in text


def test_what_is_still_to_be_uploaded_is_counted(call: Call, tmp_path: Path) -> None:
    """Also where nobody can reach the remote."""
    gone = f"file://{tmp_path}/nowhere?create=false"
    with Cache.open(gone, exit_timeout_s=0.1, retry_attempts=1) as cache:
        cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    assert call("stats", "--local", "--json").json["local"]["to_upload"] == 1
    assert call("stats", "--url", gone, "--json").code == 3
