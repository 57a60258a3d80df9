"""What importing costs: nothing heavy, until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "boto3", "botocore", "aioboto3", "aiobotocore", "aiohttp", "typer", "numpy")


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr == ""
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_s3cache_imports_next_to_nothing() -> None:
    ours = modules_after("import s3cache") - modules_after("import importlib, typing")
    assert ours - {"__future__"} == {"s3cache"}


@pytest.mark.parametrize(
    "code",
    [
        "import s3cache.cache, s3cache.store, s3cache.settings",
        # A cache with an S3 store imports botocore when it connects, in the background.
        "from s3cache import Cache, Settings; Cache(Settings(local=False))",
    ],
)
def test_using_it_imports_nothing_heavy(code: str) -> None:
    assert modules_after(code).isdisjoint(HEAVY)
