"""``s3cache doctor``, ``stats`` and ``version``."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

import s3cache
from s3cache import Cache, frame
from tests.cli.commands import Call
from tests.support.shelves import Shelf

# -- doctor


def test_warnings_are_no_fault(call: Call, shelf: Shelf) -> None:
    done = call("doctor", "--url", shelf.url, "--no-programs")
    assert done.code == 0
    assert "ok       list: allowed" in done.out
    assert "warning  trust: no key is trusted" in done.out
    assert "fix: s3cache keygen NAME, and docs/trust.md (s3cache explain trust)\n" in done.out
    assert "0 faults, 1 warning\n" in done.err
    assert shelf.names == set()


def test_a_fault_is_the_exit_code(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path))
    done = call("doctor", "--no-programs")
    assert done.code == 1
    (fix,) = (line for line in done.out.splitlines() if f"chmod go-w {tmp_path}" in line)
    assert fix.endswith(" (s3cache explain local-directory ConfigError)")
    checks = call("doctor", "--no-programs", "--json").lines
    assert [each["code"] for each in checks if each["verdict"] == "fault"] == ["ConfigError"]


def test_settings_that_cannot_be_used_are_the_only_fault(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "soon")
    done = call("doctor", "--json")
    assert (done.code, len(done.lines)) == (1, 1)
    assert "S3CACHE_LOOKUP_TIMEOUT_S" in done.json["found"]


# -- stats


def test_both_tiers_are_counted(call: Call, shelf: Shelf) -> None:
    shelf.add("a")
    shelf.add("a", variant="v", first=False)
    with Cache.open(shelf.url) as cache:
        cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    found = call("stats", "--url", shelf.url, "--json").json
    assert found["remote"]["entries"] == 3
    assert (found["local"]["entries"], found["local"]["to_upload"]) == (1, 0)
    assert found["local"]["bytes"] > 0
    assert "remote" not in call("stats", "--local", "--url", shelf.url, "--json").json
    text = call("stats", "--url", shelf.url).out
    assert "remote:\n  entries  3\n" in text


# -- version


def test_it_names_what_a_bug_report_needs(call: Call) -> None:
    done = call("version", "--json")
    assert done.code == 0
    found = done.json
    assert found["s3cache"] == s3cache.__version__
    assert platform.python_version() in found["python"]
    assert {"torch", "botocore", "platform", "libc", "zstandard"} <= set(found)
    assert found["typer"][0].isdigit()
    assert call("--version").out == f"s3cache {s3cache.__version__}\n"
