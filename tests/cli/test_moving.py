"""Commands that copy and remove entries, and commands on a bucket."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache import frame
from s3cache.cache import Cache, Hit
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
    text = call("mirror", shelf.url, other.url)
    assert damaged in text.out
    assert text.out.endswith("), 21 were there, 1 failed\n")
    assert ("new", "") in variants(other)


def signed(shelf: Shelf, name: str, key: SigningKey) -> bytes:
    """Sign an object in place, and return its new content."""
    data = signed_by(shelf.files.read(name) or b"", key)
    shelf.put(name, data)
    return data


def test_mirror_replaces_damaged_and_different_entries(
    call: Call, shelf: Shelf, other: Shelf
) -> None:
    """A sound entry of the same content stays, and another variant under the same name."""
    bad, gone, changed = (shelf.add(key, variant="v", size=300) for key in ("k", "l", "m"))
    shelf.add("good")
    shelf.add("n", variant="a", size=300)
    theirs = other.add("n", variant="b", size=200)
    before = other.files.read(theirs)
    assert call("mirror", shelf.url, other.url, "--json").json["done"] == 5
    assert other.files.read(theirs) == before
    assert other.names - shelf.names == {theirs.replace(".0", ".a")}
    other.damage(bad, 100)
    other.put(gone, b"x" * 300)
    other.add("m", variant="v", size=300)
    again = call("mirror", shelf.url, other.url, "--json").json
    assert (again["done"], again["present"], again["failed"]) == (3, 2, 0)
    for name in (bad, gone, changed):
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


def test_an_error_names_the_invalid_line_of_a_manifest(call: Call, tmp_path: Path) -> None:
    manifest = tmp_path / "keys"
    for line in ("A/B", "a b", "{", "{}", "v1/0/a.0", "-"):
        manifest.write_text(f"# fine\n{line}\n")
        done = call("ls", "--url", "memory://x", "--manifest", manifest)
        assert done.code == 2
        assert f"manifest {manifest}, line 2" in done.err


# -- on a bucket


def test_commands_work_on_a_bucket(
    call: Call, shelf: Shelf, at: Callable[[int], str], moto_port: int
) -> None:
    """Credentials that may not delete get an error that names the operator's role."""
    for number in range(4):
        shelf.add(f"key{number}", kind="other" if number < 3 else "test", size=2000)
    remote = at(moto_port)
    assert call("mirror", shelf.url, remote, "--json").json["done"] == 4
    assert len(call("ls", "--url", remote, "--kind", "other", "--json").lines) == 3
    assert call("verify", "--url", remote, "--json").json["done"] == 4
    assert call("rm", "key1", "--url", remote).code == 0
    with serving(Gate(moto_port, refusing("DELETE"))) as narrow:
        done = call("rm", "--all", "--url", at(int(narrow.rpartition(":")[2])), "--delete")
    assert (done.code, done.out) == (3, "")
    assert "needs the operator's role" in done.err
    assert len(done.err.splitlines()) == 1
    assert call("rm", "--all", "--url", remote, "--delete", "--json").json["done"] == 3


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


def test_rm_removes_whole_keys_and_no_others(call: Call, shelf: Shelf) -> None:
    shelf.add("abc")
    shelf.add("abc", variant="v", first=False)
    other = shelf.add("abcd")
    assert "2 entries" in call("rm", "--url", shelf.url, "abc", "--dry-run").err
    assert len(shelf.names) == 3
    assert call("rm", "--url", shelf.url, "abc").out.startswith("2 entries removed")
    assert shelf.names == {other}
    assert call("rm", "--url", shelf.url, "abc", "--dry-run").code == 1
    again = call("rm", "--url", shelf.url, "abc", "abcd")
    assert (again.code, again.out.splitlines()[0]) == (1, "abc: there is no such entry")
    assert "1 entry removed" in again.out
    assert call("rm", "--url", shelf.url, "../x").code == 2


def test_conditions_and_all_only_count_without_delete(call: Call, shelf: Shelf) -> None:
    """What is kept is found, even if the first entry of its key is gone."""
    old, new = shelf.add("a", days=100), shelf.add("a", variant="v", first=False)
    older = shelf.add("b", days=100)
    other = shelf.put("of/others.txt", b"none of ours")
    done = call("rm", "a", "--older", "90d", "--url", shelf.url)
    assert (done.code, done.out) == (0, f"{old}\n")
    assert call("rm", "a", "--older", "90d", "--url", shelf.url, "--delete").code == 0
    assert shelf.names == {new, older, other}
    with Cache.open(shelf.url, local=False, mode="read-only") as cache:
        assert isinstance(cache.lookup("a"), Hit)
    done = call("rm", "--all", "--url", shelf.url)
    assert (done.code, len(done.out.splitlines())) == (0, 2)
    assert "2 entries (775 B) would be removed; give --delete to do it" in done.err
    assert shelf.names == {new, older, other}
    assert call("rm", "--all", "--url", shelf.url, "--delete", "--json").json["done"] == 2
    assert shelf.names == {other}


def test_rm_removes_entries_that_meet_all_conditions(call: Call, shelf: Shelf) -> None:
    old, new = shelf.add("old", days=100), shelf.add("new")
    old_torch = shelf.add("fx", kind="other", torch="2.12.0", days=100)
    shelf.damage(shelf.add("damaged"), at=70)
    later = shelf.add("later")
    shelf.damage(later, at=9)  # the version: it may be of a later release, and not damaged
    everything = shelf.names
    dry = call("rm", "--url", shelf.url, "--older", "90d", "--json")
    assert {each["name"] for each in dry.lines} == {old, old_torch}
    assert shelf.names == everything
    assert call("rm", "--url", shelf.url, "--older", "90d", "--torch", "2.12", "--delete").code == 0
    assert shelf.names == everything - {old_torch}
    assert call("rm", "--url", shelf.url, "--unreadable", "--delete").code == 0
    assert "this machine's hits" in call("rm", "--url", shelf.url, "--never-hit", "--delete").err
    assert shelf.names == {old, new, later}
    assert call("rm", "--url", shelf.url, "--key", "ne", "--min-size", "1B", "--delete").code == 0
    assert shelf.names == {old, later}


def test_rm_removes_the_entries_of_a_manifest_and_names_missing_ones(
    call: Call, shelf: Shelf, tmp_path: Path
) -> None:
    kept = {shelf.add("a"), shelf.add("b")}
    named = shelf.add("b", variant="v", first=False)
    manifest = tmp_path / "keys"
    listed = call("ls", "--url", shelf.url, "--json").out.splitlines()
    manifest.write_text("\n".join(["gone", *(line for line in listed if named in line)]))
    arguments = ["rm", "--manifest", manifest, "--url", shelf.url]
    dry = call(*arguments)
    assert (dry.code, dry.out) == (1, f"{named}\n")
    assert "gone: there is no such entry" in dry.err
    done = call(*arguments, "--delete", "--json")
    assert done.code == 1
    assert (done.json["done"], done.json["failures"]) == (1, [["gone", "there is no such entry"]])
    assert shelf.names == kept


def test_entries_without_a_trusted_signature_can_be_removed(
    call: Call, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shelf.add("forged")
    key = call("keygen", "ci", "--to", tmp_path / "ci.key", "--json").json
    monkeypatch.setenv("S3CACHE_TRUSTED_KEYS", key["trusted_key"])
    save(shelf.url, "ours", signing_key=key["signing_key"])
    assert call("verify", "--url", shelf.url).code == 1
    assert call("rm", "--url", shelf.url, "--untrusted", "--delete").code == 0
    assert [name.rpartition("/")[2] for name in shelf.names] == ["ours.0"]
    assert call("verify", "--url", shelf.url).code == 0


def test_rm_keeps_local_entries_that_are_not_uploaded_yet(call: Call, tmp_path: Path) -> None:
    """No acknowledged save is lost, even by an operator's command."""
    gone = f"file://{tmp_path}/nowhere?create=false"
    for url in (gone, None):
        save(url, exit_timeout_s=0.1, retry_attempts=1)
    done = call("rm", "--all", "--local", "--delete", "--json")
    assert (done.json["done"], done.json["kept"]) == (1, 1)
    stats = call("stats", "--local", "--json").json["local"]
    assert (stats["entries"], stats["to_upload"]) == (1, 1)


def test_rm_keeps_the_latest_up_to_a_size(call: Call, shelf: Shelf) -> None:
    """The size counts only the entries that other options choose."""
    other = shelf.add("other", kind="other", size=9000, days=9)
    latest = [shelf.add(f"k{days}", size=1000, days=days) for days in range(4)]
    done = call("rm", "--kind", "test", "--keep", "3KB", "--url", shelf.url, "--delete")
    assert done.out.startswith("2 entries removed")
    assert shelf.names == {other, *latest[:2]}
    assert "0 entries" in call("rm", "--keep", "1MB", "--url", shelf.url).err
