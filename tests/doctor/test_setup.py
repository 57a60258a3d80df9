"""Settings, with where each came from; and each fault of trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from s3cache.doctor import Check, check_settings, check_trust
from s3cache.settings import Settings
from s3cache.trust import generate

if TYPE_CHECKING:
    from pathlib import Path

OURS, OTHER = generate("ours"), generate("other")


def settings(url: str | None = None, **options: Any) -> list[Check]:
    return [*check_settings(Settings.load(url, **options)[0], url)]


def trust(**options: Any) -> list[Check]:
    return [*check_trust(Settings.load(**options)[0])]


def test_where_each_setting_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "5")
    monkeypatch.setenv("S3CACHE_SIGNING_KEY", "/a/secret/place")
    first, second = settings("s3://bucket/prefix")
    assert first.verdict == second.verdict == "ok"
    assert "url from --url" in first.found
    assert "lookup_timeout_s=5.0 from S3CACHE_LOOKUP_TIMEOUT_S" in first.found
    assert "signing_key from S3CACHE_SIGNING_KEY" in first.found
    assert "secret" not in first.found
    assert "bucket/prefix" in second.found


def test_a_variable_that_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT", "5")
    check = settings("memory://x")[1]
    assert check.verdict == "warning"
    assert "S3CACHE_LOOKUP_TIMEOUT is not known" in check.found
    assert "S3CACHE_LOOKUP_TIMEOUT_S" in check.fix


def test_no_remote_and_no_use() -> None:
    checks = {check.name: check for check in settings(mode="off")}
    assert checks["remote"].verdict == checks["mode"].verdict == "warning"
    assert checks["remote"].fix == "set S3CACHE_URL"


@pytest.mark.parametrize(
    "url", ["ftp://bucket", "s3://AKIA:hunter2@bucket", "s3://b?secret_key=hunter2", "s3:///x"]
)
def test_a_url_that_cannot_be_used(url: str) -> None:
    check = settings(url)[-1]
    assert (check.name, check.verdict) == ("remote", "fault")
    assert check.fix
    assert "hunter2" not in str(check)


def test_nobody_is_trusted() -> None:
    [check] = trust()
    assert (check.verdict, "keygen" in check.fix) == ("warning", True)


def test_what_is_saved_is_signed_by_somebody_who_is_trusted() -> None:
    public = OURS.public_text()
    level, signing = trust(trusted_keys=public, signing_key=OURS.secret_text())
    assert (level.verdict, signing.verdict) == ("ok", "ok")
    assert "require: ours for main" in level.found


@pytest.mark.parametrize(
    ("options", "name", "verdict", "said"),
    [
        ({"trusted_keys": OURS.public_text()}, "signing", "warning", "not signed"),
        (
            {"trusted_keys": OTHER.public_text(), "signing_key": OURS.secret_text()},
            "signing",
            "fault",
            "not trusted",
        ),
        (
            {"trusted_keys": f"pulls={OURS.public_text()}", "signing_key": OURS.secret_text()},
            "signing",
            "fault",
            "not trusted for that",
        ),
        ({"trusted_keys": "nonsense"}, "trust", "fault", "trusted key"),
        ({"trust": "require"}, "trust", "fault", "no key is trusted"),
        ({"signing_key": "/nowhere/ci.key"}, "trust", "fault", "cannot be opened"),
    ],
)
def test_each_fault_of_trust(options: dict[str, Any], name: str, verdict: str, said: str) -> None:
    (check,) = (check for check in trust(**options) if check.name == name)
    assert check.verdict == verdict
    assert said in check.found
    assert check.fix


def test_a_key_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "ci.key"
    path.write_text(OURS.secret_text())
    path.chmod(0o644)
    [check] = trust(signing_key=str(path))
    assert (check.verdict, check.fix) == ("fault", f"chmod 600 {path}")


def test_who_only_reads_need_not_sign() -> None:
    assert [check.name for check in trust(trusted_keys=OURS.public_text(), mode="read-only")] == [
        "trust"
    ]
