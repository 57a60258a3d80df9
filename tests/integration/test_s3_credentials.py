"""Credentials that are refused, expire or cannot be had: found again, and never waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import AccessDeniedError
from s3cache.store import S3Options, S3Store
from tests.support.scripted import Reply, Request, ScriptedServer, error_reply

GOOD = "AKIAGOOD"


def answer(request: Request) -> Reply:
    if GOOD.lower() not in request.headers.get("authorization", ""):
        return error_reply(403, "ExpiredToken", "The provided token has expired.")
    return Reply(headers={"etag": '"e"'})


@pytest.fixture
async def store(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., S3Store]]:
    """Opens a store whose credentials are what ``config`` says in the AWS configuration."""
    opened: list[S3Store] = []

    def open_store(config: str, **options: Any) -> S3Store:
        (tmp_path / "config").write_text(f"[default]\n{config}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        place = {"endpoint_url": server.url, "region": "us-east-1", "conditional_create": "native"}
        opened.append(S3Store(S3Options("bucket", "p", **{**place, **options})))
        return opened[-1]

    server.answer = answer
    yield open_store
    for each in opened:
        await each.aclose()


def keys(path: Path, access_key: str) -> None:
    (path / "credentials").write_text(
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\n"
    )


async def test_keys_that_somebody_renews_in_a_file_are_found(
    store: Callable[..., S3Store], tmp_path: Path
) -> None:
    """As short-lived ones are renewed on many clusters; botocore reads that file once."""
    keys(tmp_path, "AKIAOLD")
    s3 = store("")
    with pytest.raises(AccessDeniedError, match="expired"):
        await s3.put("key", b"data")
    keys(tmp_path, GOOD)
    await s3.put("key", b"data")
