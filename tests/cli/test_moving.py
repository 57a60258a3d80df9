"""Commands that copy entries, and commands on a bucket."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache import Cache, frame
from s3cache.trust import SigningKey, generate
from tests.cli.commands import Call, save
from tests.support.fakes import Gate, refusing, serving
from tests.support.forging import signed_by
from tests.support.shelves import Shelf


@pytest.fixture
def other(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "other")


def variants(shelf: Shelf) -> set[tuple[str, str]]:
    headers = [frame.decode_head(shelf.files.read(name) or b"").header for name in shelf.names]
    return {(header.key, header.variant) for header in headers}


def test_mirror_copies_sound_entries_and_later_only_new_ones(
    call: Call, shelf: Shelf, other: Shelf
) -> None:
    names = {shelf.add(f"key{number}", size=500) for number in range(20)}
    names.add(shelf.add("key1", variant="v", first=False))
    damaged = shelf.add("damaged")
    shelf.damage(damaged)
    found = call("mirror", shelf.url, other.url, "--json")
    assert found.code == 1
    assert (found.json["done"], found.json["failed"]) == (21, 1)
    # Either variant of a key may be the first one in the mirror.
    assert len(other.names) == len(names)
    assert variants(other) == variants(shelf) - {("damaged", "")}
    assert call("verify", "--url", other.url).code == 0
    shelf.add("new")
    again = call("mirror", shelf.url, other.url, "--json").json
    assert (again["done"], again["present"]) == (1, 21)
    assert ("new", "") in variants(other)
    text = call("mirror", shelf.url, other.url)
    assert damaged in text.out
    assert "0 copied (0 B), 22 were there, 1 failed" in text.out


def test_mirror_keeps_another_variant_under_the_same_name(
    call: Call, shelf: Shelf, other: Shelf
) -> None:
    """If the first entries of two stores differ, the target then has both variants."""
    shelf.add("k", variant="a", size=300)
    theirs = other.add("k", variant="b", size=200)
    before = other.files.read(theirs)
    assert call("mirror", shelf.url, other.url).code == 0
    assert other.files.read(theirs) == before
    assert {name.rpartition(".")[2] for name in other.names} == {"0", "a"}


def signed(shelf: Shelf, name: str, key: SigningKey) -> bytes:
    """Sign an object in place, and return its new content."""
    data = signed_by(shelf.files.read(name) or b"", key)
    shelf.put(name, data)
    return data


@pytest.mark.parametrize("place", ["the header", "all of it", "another entry"])
def test_mirror_replaces_damaged_and_different_entries(
    call: Call, shelf: Shelf, other: Shelf, place: str
) -> None:
    """A sound entry of the same content stays."""
    name = shelf.add("k", variant="v", size=300)
    shelf.add("good")
    assert call("mirror", shelf.url, other.url, "--json").json["failed"] == 0
    if place == "another entry":
        other.add("k", variant="v", size=300)
    elif place == "all of it":
        other.put(name, b"x" * 300)
    else:
        other.damage(name, 100)
    again = call("mirror", shelf.url, other.url, "--json").json
    assert (again["done"], again["present"], again["failed"]) == (1, 1, 0)
    assert other.files.read(name) == shelf.files.read(name)
    assert call("verify", "--url", other.url).code == 0
    assert call("mirror", shelf.url, other.url, "--json").json["done"] == 0


def test_mirror_keeps_trusted_entries_and_adds_copies_beside_forged_ones(
    call: Call, shelf: Shelf, other: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, stranger = generate("ci"), generate("ci")
    sources = {each: signed(shelf, shelf.add(each), key) for each in ("ours", "forged", "unsigned")}
    name = other.add("ours")
    stays = signed(other, name, key)
    signed(other, other.add("forged"), stranger)
    other.add("unsigned")
    monkeypatch.setenv("S3CACHE_TRUSTED_KEYS", key.public_text())
    found = call("mirror", shelf.url, other.url, "--json").json
    assert (found["done"], found["present"], found["failed"]) == (2, 1, 0)
    assert other.files.read(name) == stays != sources["ours"]
    # An untrusted entry keeps the first name; the trusted one is stored beside it.
    there = [other.files.read(each) for each in other.names]
    assert sources["forged"] in there
    assert sources["unsigned"] in there
    assert call("mirror", shelf.url, other.url, "--json").json["present"] == 3


def test_a_signed_entry_replaces_the_same_entry_without_signatures(
    call: Call, shelf: Shelf, other: Shelf
) -> None:
    name = shelf.add("k")
    other.put(name, shelf.files.read(name) or b"")
    data = signed(shelf, name, generate("ci"))
    assert call("mirror", shelf.url, other.url, "--json").json["done"] == 1
    assert other.files.read(name) == data
    assert call("mirror", shelf.url, other.url, "--json").json["present"] == 1


def test_push_uploads_the_entries_of_this_machine(call: Call, shelf: Shelf) -> None:
    """Pending entries, and uploaded entries that are gone from the remote, are uploaded."""
    save(shelf.url, "uploaded")
    shutil.rmtree(shelf.root)
    save(shelf.url + "?create=false", "waiting", exit_timeout_s=0.1, retry_attempts=1)
    assert call("push", "--url", shelf.url).code == 0
    assert {name.rpartition("/")[2] for name in shelf.names} == {"uploaded.0", "waiting.0"}
    assert call("stats", "--local", "--json").json["local"]["to_upload"] == 0
    assert call("verify", "--url", shelf.url).code == 0


def test_uploads_that_wait_for_another_url_are_named(
    call: Call, shelf: Shelf, tmp_path: Path
) -> None:
    """For example, the server is now named by its address."""
    elsewhere = f"file://{tmp_path}/elsewhere"
    save(f"{elsewhere}?create=false", "waiting", exit_timeout_s=0.1, retry_attempts=1)
    (check,) = [
        check
        for check in call("doctor", "--url", shelf.url, "--no-programs", "--json").lines
        if check["name"] == "uploads"
    ]
    assert check["verdict"] == "warning"
    assert f"uploads for another URL, {elsewhere}: 1" in check["found"]
    done = call("push", "--url", shelf.url)
    assert f"uploads that wait for another URL, {elsewhere}: 1" in done.err
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    assert "another URL" not in call("push", "--url", elsewhere).err
    assert "another URL" not in call("push", "--url", shelf.url).err


def test_pull_takes_keys_and_a_manifest(call: Call, shelf: Shelf, tmp_path: Path) -> None:
    for key in ("a", "b", "c"):
        shelf.add(key)
    manifest = tmp_path / "keys"
    manifest.write_text("# of yesterday's run\nb  # large\n\nc\n")
    found = call("pull", "a", "--manifest", manifest, "--url", shelf.url, "--json")
    assert found.code == 0
    assert found.json["done"] == 3
    again = call("pull", "a", "absent", "--url", shelf.url)
    assert again.code == 1
    assert "absent: there is no such entry" in again.out
    assert "0 copied (0 B), 1 were there" in again.out
    shutil.rmtree(shelf.root)
    with Cache.open(shelf.url) as cache:  # they hit without the remote
        assert {getattr(cache.lookup(key), "tier", None) for key in "abc"} == {"local"}


@pytest.mark.parametrize("line", ["A/B", "a b", "{", "v1/0/a.0", "-"])
def test_an_error_names_the_invalid_line_of_a_manifest(
    call: Call, shelf: Shelf, tmp_path: Path, line: str
) -> None:
    manifest = tmp_path / "keys"
    manifest.write_text(f"# fine\n{line}\n")
    done = call("ls", "--url", shelf.url, "--manifest", manifest)
    assert done.code == 2
    assert f"manifest {manifest}, line 2" in done.err


# -- on a bucket


def test_commands_work_on_a_bucket(
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
    with serving(Gate(moto_port, refusing("DELETE"))) as narrow:
        done = call("rm", "--all", "--url", at(int(narrow.rpartition(":")[2])), "--delete")
    assert (done.code, done.out) == (3, "")
    assert "needs the operator's role" in done.err
    assert len(done.err.splitlines()) == 1
    assert call("rm", "--all", "--url", remote, "--delete", "--json").json["done"] == 11


def test_a_push_to_a_missing_server_or_bucket_fails_early(
    call: Call, at: Callable[[int], str], moto_port: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        no_server = at(server.getsockname()[1])
    save(no_server, exit_timeout_s=0.1, retry_attempts=1)
    done = call("push", "--url", no_server)
    assert (done.code, done.out) == (3, "")
    assert "cannot connect" in done.err
    assert call("stats", "--local", "--json").json["local"]["to_upload"] == 1
    no_bucket = call("push", "--url", f"s3://there-is-none?{at(moto_port).partition('?')[2]}")
    assert no_bucket.code == 3
    assert "the bucket does not exist" in no_bucket.err
