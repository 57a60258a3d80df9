"""Commands on a bucket; most of what they do is tested on directories."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from s3cache import Cache, frame
from tests.cli.commands import Call
from tests.support.gate import Gate, refusing
from tests.support.shelves import Shelf


def test_from_a_directory_to_a_bucket_and_back_to_nothing(
    call: Call, shelf: Shelf, at: Callable[[int], str], moto_port: int
) -> None:
    """Credentials that may not delete get an error that names the operator's role."""
    for number in range(12):
        shelf.add(f"key{number}", kind="other" if number < 3 else "test", size=2000)
    remote = at(moto_port)
    assert call("mirror", shelf.url, remote, "--json").json["done"] == 12
    assert len(call("ls", "--url", remote, "--kind", "other", "--json").lines) == 3
    assert call("verify", "--url", remote, "--json").json["done"] == 12
    assert call("rm", "key1", "--url", remote).code == 0
    with Gate(moto_port) as narrow:
        narrow.rule = refusing("DELETE")
        done = call("clear", "--url", at(narrow.port), "--yes")
    assert (done.code, done.out) == (3, "")
    assert "takes the operator's role" in done.err
    assert len(done.err.splitlines()) == 1
    assert call("clear", "--url", remote, "--yes", "--json").json["done"] == 11


def test_a_push_to_what_is_not_there_does_not_try_until_its_time_is_over(
    call: Call, at: Callable[[int], str], moto_port: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        no_server = at(server.getsockname()[1])
    with Cache.open(no_server, exit_timeout_s=0.1, retry_attempts=1) as cache:
        cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    done = call("push", "--url", no_server)
    assert (done.code, done.out) == (3, "")
    assert "cannot connect" in done.err
    assert call("stats", "--local", "--json").json["local"]["to_upload"] == 1
    no_bucket = call("push", "--url", f"s3://there-is-none?{at(moto_port).partition('?')[2]}")
    assert no_bucket.code == 3
    assert "the bucket does not exist" in no_bucket.err


def test_storage_is_measured_and_what_was_written_is_removed_or_said_to_stay(
    call: Call, at: Callable[[int], str], moto_port: int
) -> None:
    found = call("bench", "--url", at(moto_port), "--json").json
    assert list(found["storage"]) == ["small_put", "small_get", "miss", "large_put", "large_get"]
    assert all(times["median_s"] > 0 for times in found["storage"].values())
    large = found["storage"]["large_get"]
    assert large["mb_s"] == pytest.approx(large["bytes"] / large["median_s"] / 1e6)
    written = sum(len(found["storage"][name]["seconds"]) for name in ("small_put", "large_put"))
    assert (found["removed"], found["left"]) == (written, 0)
    with Gate(moto_port) as narrow:
        narrow.rule = refusing("DELETE")
        done = call("bench", "--url", at(narrow.port))
    assert done.code == 0
    assert "left below s3cache-bench/" in done.out
    assert "large get" in done.out
