"""Machines as these tests use them: jobs are below ``tests.hooks`` and do their own accounts."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support import machines

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Machine"]


class Machine:
    """A disk, and processes of which each may have an environment of its own."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self.environment = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", **environment}

    def run(
        self, job: str, *arguments: Any, python: str = sys.executable, **environment: str
    ) -> Any:
        """What ``tests.hooks.<module>:<function>`` returns; ``stderr`` too, if it is a ``dict``."""
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        outcome = machine.run(f"tests.hooks.{job}", *arguments, python=python)
        if isinstance(outcome.result, dict):
            return {**outcome.result, "stderr": outcome.stderr}
        return outcome.result

    def start(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``python command`` to its end, good or bad."""
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        return subprocess.run(
            [sys.executable, *command],
            env=machine.environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
