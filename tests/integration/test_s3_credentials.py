"""Credentials that are refused, expire or cannot be had: found anew, and never waited for."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.errors import AccessDeniedError
from s3cache.store import S3Options, S3Store
from tests.support.scripted import Reply, Request, ScriptedServer, error_reply
from tests.support.waiting import LONG_S, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

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


def _is_gone(process: int) -> bool:
    """It neither runs nor waits to be reaped."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_process_for_credentials_that_hangs_is_ended(
    store: Callable[..., S3Store], tmp_path: Path
) -> None:
    """In time, and nothing is left of it; once it answers the store works."""
    script = tmp_path / "credentials.sh"
    script.write_text(f"#!/bin/sh\necho $$ >>{tmp_path}/pids\nexec sleep 1000\n")
    script.chmod(0o700)
    s3 = store(f"credential_process = {script}", read_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(AccessDeniedError, match=r"getting credentials failed.*no answer within"):
        await s3.put("key", b"data")
    assert time.monotonic() - started < LONG_S
    (process,) = map(int, (tmp_path / "pids").read_text().split())
    assert await asyncio.to_thread(_is_gone, process)
    said = f'{{"Version": 1, "AccessKeyId": "{GOOD}", "SecretAccessKey": "s"}}'
    script.write_text(f"#!/bin/sh\necho '{said}'\n")
    await s3.put("key", b"data")


async def test_one_that_hangs_when_it_renews_them_is_ended_too(
    store: Callable[..., S3Store], tmp_path: Path
) -> None:
    """Hours later, in the middle of a call."""
    script = tmp_path / "credentials.sh"
    then = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 601))
    said = (
        f'{{"Version": 1, "AccessKeyId": "{GOOD}", "SecretAccessKey": "s", "Expiration": "{then}"}}'
    )
    script.write_text(
        f"#!/bin/sh\n"
        f"if [ -e {tmp_path}/pids ]; then echo $$ >>{tmp_path}/pids; exec sleep 1000; fi\n"
        f"touch {tmp_path}/pids\necho '{said}'\n"
    )
    script.chmod(0o700)
    s3 = store(f"credential_process = {script}", read_timeout_s=0.5)
    await s3.connect()
    await asyncio.sleep(2.0)  # less than ten minutes are left: they must be renewed now
    started = time.monotonic()
    with pytest.raises(AccessDeniedError, match="no answer within"):
        await s3.put("key", b"data")
    assert time.monotonic() - started < LONG_S
    started_ones = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert started_ones
    await asyncio.to_thread(eventually, lambda: all(map(_is_gone, started_ones)))
