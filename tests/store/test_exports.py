"""What importing ``s3cache.store`` and opening a store does not load."""

from __future__ import annotations

import subprocess
import sys


def test_importing_it_loads_no_client() -> None:
    code = (
        "import sys; from s3cache.store import open_store; open_store('s3://bucket/p')\n"
        "heavy = {'aioboto3', 'aiobotocore', 'boto3', 'botocore', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
