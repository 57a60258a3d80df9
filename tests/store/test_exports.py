"""What ``s3cache.store`` exports, and what importing it does not load."""

from __future__ import annotations

import subprocess
import sys

import s3cache.store


def test_every_public_name_is_there() -> None:
    for name in s3cache.store.__all__:
        assert getattr(s3cache.store, name) is not None
    assert set(s3cache.store.__all__) <= set(dir(s3cache.store))


def test_importing_it_loads_no_client_and_no_event_loop() -> None:
    code = (
        "import sys, s3cache.store\n"
        "heavy = {'aioboto3', 'aiobotocore', 'boto3', 'botocore', 'tenacity', 'asyncio', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
