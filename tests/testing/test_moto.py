"""A moto server lives as long as the tests that started it, and has buckets for their URLs."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from s3cache.errors import ConfigError
from s3cache.testing import Machine, MotoBucket, MotoServer
from tests.support.scripts import python


def use_the_bucket() -> str:
    """List and put in the store that the environment names."""
    import asyncio
    import os

    from s3cache.store import open_store

    async def use() -> str:
        store = open_store(os.environ["S3CACHE_URL"])
        before = [info.key async for info in store.list()]
        await store.put("key", b"content")
        after = [info.key async for info in store.list()]
        await store.aclose()
        return f"{before} {after}"

    return asyncio.run(use())


@pytest.mark.parametrize("test", ["one", "another"])
def test_a_program_needs_its_environment_only_and_the_bucket_is_empty(
    test: str, s3cache_moto: MotoBucket, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / test, **s3cache_moto.environment)
    assert machine.call(use_the_bucket).result == "[] ['key']"
    assert s3cache_moto.secret_key not in s3cache_moto.url + repr(s3cache_moto)


def test_the_server_ends_with_the_process_that_started_it() -> None:
    """It ends even if that process is killed and does not close it."""
    code = (
        "import os, psutil\n"
        "from s3cache.testing import MotoServer\n"
        "server = MotoServer()\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = python("-c", code)
    assert done.returncode == -9, done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(30)


def test_a_missing_flask_raises_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(
        ConfigError, match=r"flask is not installed; run: pip install .*\[testing\]"
    ):
        MotoServer()
