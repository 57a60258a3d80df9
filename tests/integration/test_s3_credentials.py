"""Refused and expired credentials are read again from their file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache.errors import AccessDeniedError
from s3cache.store import S3Store
from tests.support.scripted import Reply, Request, ScriptedServer, error_reply

GOOD = "AKIAGOOD"


def answer(request: Request) -> Reply:
    if GOOD.lower() not in request.headers.get("authorization", ""):
        return error_reply(403, "ExpiredToken", "The provided token has expired.")
    return Reply(headers={"etag": '"e"'})


def keys(path: Path, access_key: str) -> None:
    (path / "credentials").write_text(
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\n"
    )


async def test_renewed_credentials_in_a_file_are_used(
    server: ScriptedServer,
    open_scripted: Callable[..., S3Store],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many clusters renew short-lived credentials in this file, but botocore reads it only once."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    server.answer = answer
    keys(tmp_path, "AKIAOLD")
    s3 = open_scripted(access_key=None, secret_key=None, conditional_create="native")
    with pytest.raises(AccessDeniedError, match="expired"):
        await s3.put("key", b"data")
    keys(tmp_path, GOOD)
    await s3.put("key", b"data")
