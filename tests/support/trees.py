"""Copies of the repository without the folders of some features.

A feature is its folder, its tests and its name in the list. Processes that tests of a copy start
import the copy, so the folders are missing for them too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from tests.support.machines import ROOT

#: Names the missing features for tests with the mark ``needs``.
VARIABLE = "S3CACHE_TEST_WITHOUT"
_NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "site")


def without(root: Path, *features: str) -> Path:
    """Copy the repository to ``root``, and remove features."""
    ignore = shutil.ignore_patterns(*_NOT_COPIED)
    shutil.copytree(ROOT, root, ignore=ignore, dirs_exist_ok=True)
    for feature in features:
        shutil.rmtree(root / "s3cache" / "features" / feature)
        shutil.rmtree(root / "tests" / "features" / feature, ignore_errors=True)
    names = root / "s3cache" / "features" / "__init__.py"
    pattern = rf'"({"|".join(features)})",? ?'
    names.write_text(re.sub(pattern, "", names.read_text(encoding="utf-8")), encoding="utf-8")
    return root


def check(tree: Path, *command: str, lacking: Collection[str], timeout_s: float = 3600.0) -> None:
    """Run a module of Python in a copy; fail with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tree,
        env={**os.environ, VARIABLE: ",".join(lacking), "PYTHONPATH": str(tree)},
        check=False, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
