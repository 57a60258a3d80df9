"""A moto server is there for the tests that started it, and its buckets are what URLs say."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from s3cache.errors import ConfigError
from s3cache.store import S3Options, parse_url
from s3cache.testing import Machine, MotoBucket, MotoServer


def use_the_bucket() -> str:
    """Put, get and list in the place that the environment says."""
    import asyncio
    import os

    from s3cache.store import open_store

    async def use() -> str:
        store = open_store(os.environ["S3CACHE_URL"])
        await store.put("key", b"content")
        keys = [info.key async for info in store.list()]
        got = await store.get("key")
        await store.aclose()
        assert got is not None
        return f"{keys} {bytes(got).decode()}"

    return asyncio.run(use())


def test_a_program_needs_its_environment_only(
    s3cache_moto: MotoBucket, tmp_path_factory: pytest.TempPathFactory
) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"), **s3cache_moto.environment)
    assert machine.call(use_the_bucket).result == "['key'] content"


def test_the_url_says_all_but_the_credentials(
    s3cache_moto: MotoBucket, s3cache_moto_server: MotoServer
) -> None:
    place = parse_url(s3cache_moto.url)
    assert isinstance(place, S3Options)
    assert (place.bucket, place.prefix) == (s3cache_moto.name, "")
    assert (place.endpoint_url, place.region) == (s3cache_moto.endpoint_url, "us-east-1")
    assert s3cache_moto.secret_key not in s3cache_moto.url + repr(s3cache_moto)
    assert s3cache_moto_server.make_bucket("by-name").url != s3cache_moto.url


def test_it_ends_with_the_process_that_started_it() -> None:
    """Also where that is killed, and closes nothing."""
    code = (
        "import os, psutil\n"
        "from s3cache.testing import MotoServer\n"
        "server = MotoServer()\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(30)


def test_a_missing_moto_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(
        ConfigError, match=r"flask is not installed; run: pip install .*\[testing\]"
    ):
        MotoServer()
