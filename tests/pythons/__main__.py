"""Run the tests that need no torch with all supported versions of Python.

    [PYTHONS="3.12 3.13"] python -m tests.pythons [pytest's arguments]

Each installed interpreter gets a separate environment, ``.venv-python-3.X``, with all pinned
dependencies except torch, which takes gigabytes. ``make test-torch PYTHON=...`` runs the other
tests with another Python. A summary at the end lists results and missing versions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")  # as requires-python in pyproject.toml
NOT_NEEDED = ("torch", "torch-s3cache", "einops", "expecttest", "transformers")
# These folders mostly test servers and scripts.
LEFT_OUT = [f"--ignore=tests/{folder}" for folder in ("faults", "infra", "rgw")]


def interpreter(version: str) -> str | None:
    """Return a Python of this version, from the PATH or from pyenv."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in (f"python{version}", *map(str, home.glob(f"versions/{version}.*/bin/python3"))):
        # The first one may be a shim of pyenv without an installed Python.
        try:
            subprocess.run([path, "-c", "import venv"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


def requirements() -> list[str]:
    """Return the requirements of s3cache and its tests, without those of torch's tests."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib is newer than 3.10
    lists = re.findall(r"(?ms)^(?:dependencies|cli|testing|test) = \[\n(.*?)^\]", text)
    found = re.findall(r'"(([\w-]+)[^"]*)"', "".join(lists))
    return [requirement for requirement, name in found if name not in NOT_NEEDED]


def environment(version: str, python: str) -> str:
    """Return the Python of the environment; build the environment if it is missing."""
    place = ROOT / f".venv-python-{version}"
    own, ready = str(place / "bin" / "python"), place / ".ready"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", place], check=True)
        pip = [own, "-m", "pip", "install", "--quiet"]
        constraints = place / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        constraints.write_text(re.sub(r"(?m)^torch==.*\n", "", pins))
        subprocess.run([*pip, "-c", str(constraints), *requirements()], check=True)
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        ready.touch()
    return own


def main() -> int:
    summary, failed = [], False
    for version in os.environ.get("PYTHONS", "").split() or PYTHONS:
        python = interpreter(version)
        if python is None:
            summary.append(f"Python {version}: not found")
            continue
        print(f"=== {version}: {python}", flush=True)
        command = [environment(version, python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["tests", *LEFT_OUT, *sys.argv[1:]]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        last = done.stdout.strip().splitlines()[-1:] or ["nothing was printed"]
        summary.append(f"Python {version}: {last[0].strip('= ')}")
        failed |= done.returncode != 0
    print(*summary, sep="\n")
    return int(failed or not any("passed" in line for line in summary))


if __name__ == "__main__":
    sys.exit(main())
