"""All checks together: credentials that cannot be had, and nothing that is waited for for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from s3cache.insight import Check, examine
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from pathlib import Path

URL = "s3://bucket/p?endpoint_url=http://127.0.0.1:9&region=us-east-1"


@pytest.fixture(autouse=True)
def no_local_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_LOCAL", "0")


def examined(url: str | None = URL, timeout_s: float = 5.0) -> dict[str, Check]:
    checks = examine(url, programs=False, timeout_s=timeout_s)
    return {check.name: check for check in checks}


def test_no_credentials() -> None:
    found = examined()
    assert found["credentials"].verdict == "fault"
    assert "AWS_PROFILE" in found["credentials"].fix
    assert "list" not in found  # which they explain
    assert "trust" in found  # which they do not


def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    check = examined()["credentials"]
    assert check.verdict == "fault"
    assert "nobody" in check.found


def test_a_program_for_credentials_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(monkeypatch, tmp_path, "[default]\ncredential_process = sleep 600\n")
    started = time.monotonic()
    check = examined(timeout_s=1.0)["credentials"]
    assert check.verdict == "fault"
    assert "no answer within 1 s" in check.found
    assert time.monotonic() - started < LONG_S


def test_a_program_for_credentials_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(monkeypatch, tmp_path, "[default]\ncredential_process = false\n")
    assert examined()["credentials"].verdict == "fault"


@pytest.mark.parametrize("option", ["anonymous=true", "profile=mine"])
def test_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str) -> None:
    keys = "aws_access_key_id = AKIA\naws_secret_access_key = hunter2"
    configure(monkeypatch, tmp_path, f"[profile mine]\n{keys}\n")
    found = examined(f"{URL}&{option}")
    assert found["credentials"].verdict == "ok"
    assert ("anonymous" if "anonymous" in option else "config") in found["credentials"].found
    assert "hunter2" not in str(found)
    assert found["list"].verdict == "fault"  # nobody listens there
    assert "network" in found["list"].fix


def test_a_reader_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("S3CACHE_MODE", "read-only")
    assert examined(f"file://{tmp_path}/remote")["put"].verdict == "skipped"
