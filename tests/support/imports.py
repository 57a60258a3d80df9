"""What a piece of code imports, seen from outside."""

from __future__ import annotations

import subprocess
import sys

from tests.support.waiting import LONG_S


def modules_after(code: str) -> set[str]:
    """Top-level modules that a new process has imported after it ran ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    assert done.stderr == ""
    return {name.partition(".")[0] for name in done.stdout.split()}
