"""Run the tests that need no torch with every Python that s3cache is for; make test-pythons.

    [PYTHONS="3.12 3.13"] python -m tests.pythons [pytest's arguments]

Each interpreter that is found gets an environment of its own, ``.venv-python-3.X``, with the pinned
dependencies but torch, which takes gigabytes for each; ``make test-torch PYTHON=...`` runs the rest
with another Python. Says at the end which ran and which were not found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")  # as requires-python in pyproject.toml
NOT_NEEDED = ("torch", "torch-s3cache", "einops", "expecttest", "transformers")
# They test servers, and the demo's scripts, more than Python.
LEFT_OUT = [f"--ignore=tests/{folder}" for folder in ("faults", "infra", "rgw")]


def interpreter(version: str) -> str | None:
    """A Python of that version: on the PATH, or one of pyenv's."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted(home.glob(f"versions/{version}.*/bin/python3"))]
    for path in candidates:
        # The first may be a shim of pyenv's that has no Python behind it.
        if path and not subprocess.run([path, "-c", "import venv"], capture_output=True).returncode:
            return path
    return None


def requirements() -> list[str]:
    """What s3cache and its tests ask for, but what only torch's tests need."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib is newer than 3.10
    lists = re.findall(
        r"^(?:dependencies|testing|test) = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE
    )
    every = [each for part in lists for each in re.findall(r'"([^"]+)"', part)]
    return [each for each in every if re.match(r"[\w-]+", each)[0] not in NOT_NEEDED]  # type: ignore[index]


def environment(version: str, python: str) -> Path:
    """Its environment, built if it is not there."""
    place = ROOT / f".venv-python-{version}"
    ready = place / ".ready"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", place], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        constraints = place / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        constraints.write_text(re.sub(r"^torch==.*\n", "", pins, flags=re.MULTILINE))
        subprocess.run([*pip, "-c", str(constraints), *requirements()], check=True)
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        ready.touch()
    return place / "bin" / "python"


def main() -> int:
    summary, failed = [], False
    for version in os.environ.get("PYTHONS", "").split() or PYTHONS:
        python = interpreter(version)
        if python is None:
            summary.append(f"Python {version}: not found")
            continue
        print(f"=== {version}: {python}", flush=True)
        own = environment(version, python)
        command = [
            str(own),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests",
            *LEFT_OUT,
            *sys.argv[1:],
        ]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        last = done.stdout.strip().splitlines()[-1:] or ["nothing was printed"]
        full = subprocess.run([own, "-V"], stdout=subprocess.PIPE, text=True, check=True)
        summary.append(f"{full.stdout.strip()}: {last[0].strip('= ')}")
        failed |= done.returncode != 0
    print(*summary, sep="\n")
    return int(failed or not any("passed" in line for line in summary))


if __name__ == "__main__":
    sys.exit(main())
