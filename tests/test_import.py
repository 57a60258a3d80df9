"""s3cache imports heavy packages only when they are used."""

from __future__ import annotations

import pytest

from tests.support.scripts import modules_after

HEAVY = ("torch", "boto3", "botocore", "aioboto3", "aiobotocore", "aiohttp", "typer", "numpy")


def test_import_s3cache_imports_no_other_modules() -> None:
    ours = modules_after("import s3cache") - modules_after("import importlib, typing")
    assert ours - {"__future__"} == {"s3cache"}


@pytest.mark.parametrize(
    "code",
    [
        "import s3cache.cache, s3cache.store, s3cache.settings",
        # A cache with an S3 store imports botocore when it connects, in the background.
        "from s3cache import Cache, Settings; Cache(Settings(local=False))",
        "from s3cache.store import open_store; open_store('s3://bucket/p')",
    ],
)
def test_opening_a_cache_imports_no_heavy_packages(code: str) -> None:
    assert modules_after(code).isdisjoint(HEAVY)
