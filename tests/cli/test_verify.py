"""``s3cache verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache import Cache, frame

if TYPE_CHECKING:
    from tests.cli.commands import Call
    from tests.support.shelves import Shelf


def test_every_byte_counts(call: Call, shelf: Shelf) -> None:
    names = [shelf.add(f"key{number}", size=3000) for number in range(6)]
    done = call("verify", "--url", shelf.url)
    assert done.code == 0
    assert done.out.startswith("6 sound (")
    shelf.damage(names[0])  # in a section: its header is sound
    shelf.damage(names[1], at=70)
    shelf.put(names[2], (shelf.files.read(names[2]) or b"") + b"more")
    shelf.put(names[3], shelf.files.read(names[4]) or b"")
    done = call("verify", "--url", shelf.url, "--json")
    assert done.code == 1
    found = done.json
    assert (found["done"], found["failed"]) == (2, 4)
    assert {name for name, _ in found["failures"]} == {*names[:4]}
    text = call("verify", "--url", shelf.url)
    assert f"{names[0]}: section 'entry': its bytes do not match their digest" in text.out
    assert text.code == 1
    assert call("verify", "--url", shelf.url, "--key", "key4").code == 0


def test_the_local_tier_is_verified_too(call: Call) -> None:
    with Cache.open() as cache:
        cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    assert call("verify", "--local", "--json").json["done"] == 1
