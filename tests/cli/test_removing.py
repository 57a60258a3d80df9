"""``s3cache rm``, by keys and by conditions."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3cache.cache import Cache, Hit
from tests.cli.commands import Call, save
from tests.support.shelves import Shelf


def test_rm_removes_whole_keys_and_no_others(call: Call, shelf: Shelf) -> None:
    shelf.add("abc")
    shelf.add("abc", variant="v", first=False)
    other = shelf.add("abcd")
    dry = call("rm", "--url", shelf.url, "abc", "--dry-run")
    assert "2 entries" in dry.err
    assert len(shelf.names) == 3
    assert call("rm", "--url", shelf.url, "abc").out.startswith("2 entries removed")
    assert shelf.names == {other}
    assert call("rm", "--url", shelf.url, "abc", "--dry-run").code == 1
    again = call("rm", "--url", shelf.url, "abc", "abcd")
    assert (again.code, again.out.splitlines()[0]) == (1, "abc: there is no such entry")
    assert "1 entry removed" in again.out
    assert call("rm", "--url", shelf.url, "../x").code == 2


def test_conditions_and_all_only_count_without_delete(call: Call, shelf: Shelf) -> None:
    old, new = shelf.add("a", days=100), shelf.add("a", variant="v", first=False)
    older = shelf.add("b", days=100)
    other = shelf.put("of/others.txt", b"none of ours")
    done = call("rm", "a", "--older", "90d", "--url", shelf.url)
    assert (done.code, done.out) == (0, f"{old}\n")
    assert call("rm", "a", "--older", "90d", "--url", shelf.url, "--delete").code == 0
    assert shelf.names == {new, older, other}
    done = call("rm", "--all", "--url", shelf.url)
    assert (done.code, len(done.out.splitlines())) == (0, 2)
    assert "2 entries (775 B) would be removed; give --delete to do it" in done.err
    assert shelf.names == {new, older, other}
    assert call("rm", "--all", "--url", shelf.url, "--delete", "--json").json["done"] == 2
    assert shelf.names == {other}


def test_rm_removes_entries_that_meet_all_conditions(call: Call, shelf: Shelf) -> None:
    old, new = shelf.add("old", days=100), shelf.add("new")
    old_torch = shelf.add("fx", kind="other", torch="2.12.0", days=100)
    damaged = shelf.add("damaged")
    shelf.damage(damaged, at=70)
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


def test_what_rm_keeps_is_found_though_the_first_entry_of_its_key_is_gone(
    call: Call, shelf: Shelf
) -> None:
    shelf.add("abc", variant="old", days=100)
    kept = shelf.add("abc", variant="new", first=False)
    assert call("rm", "--url", shelf.url, "--older", "90d", "--delete").code == 0
    assert shelf.names == {kept}
    assert call("verify", "--url", shelf.url).code == 0
    with Cache.open(shelf.url, local=False, mode="read-only") as cache:
        assert isinstance(cache.lookup("abc"), Hit)


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
