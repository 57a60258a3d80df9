"""Run the frameworks' programs on machines, judge them, and write the table of docs/frameworks.md.

    python -m tests.frameworks [--quick] [--only NAME ...] [--folder build/frameworks] [--page PAGE]

Each program runs six times: twice without s3cache, on one disk; twice with it on one disk, once
turned on by ``python -m s3cache run`` and once by two lines of code; and on two empty machines, by
``run`` and by ``S3CACHE_URL`` alone. ``--quick`` leaves out second processes, and one of these two
machines. What is done is kept in the folder: run again, it goes on where it was ended; delete it to
begin anew. Ends with 1 where anything is not as ``catalog.py`` says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from benchmarks.render import fill
from tests.frameworks.catalog import PROGRAMS, Program
from tests.frameworks.judge import complaints
from tests.frameworks.runs import RUNS, run_program
from tests.frameworks.table import table

QUICK = ("alone", "first", "third")
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks")
    parser.add_argument("--folder", type=Path, default=Path("build/frameworks"))
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), help="these programs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "frameworks.md")
    parser.add_argument("--quick", action="store_true", help="three runs of each, and not six")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    options.folder = options.folder.resolve()  # URLs are made of it
    bad = False
    results = {name: _read(options.folder, name) for name in PROGRAMS}
    for name in options.only or PROGRAMS:
        print(f"{name}: {PROGRAMS[name].does}", flush=True)
        results[name] = _kept(options.folder, name, QUICK if options.quick else RUNS)
        for complaint in complaints(PROGRAMS[name], results[name]):
            bad = True
            print(f"  NOT AS THE CATALOG SAYS: {complaint}", flush=True)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(fill(page, "frameworks", table(PROGRAMS, results)), encoding="utf-8")
    return int(bad)


def _read(folder: Path, name: str) -> dict[str, Any]:
    kept = folder / f"{name}.json"
    return dict(json.loads(kept.read_text())) if kept.exists() else {}


def _kept(folder: Path, name: str, runs: Collection[str]) -> dict[str, Any]:
    """What the program came to; or ``skipped``, with the reason, or ``failed``."""
    if not (found := _read(folder, name)):
        program = PROGRAMS[name]
        try:
            found = {"version": _version(program), "torch": version("torch")}
            with tempfile.TemporaryDirectory(dir=folder) as root:
                trials = {}
                headers = folder / "compiler"
                for what, trial in run_program(Path(root), name, program, runs, headers=headers):
                    print(f"  {what}: {trial.told()}", flush=True)
                    trials[what] = trial.as_json()
                found["trials"] = trials
        except PackageNotFoundError as exc:
            return {"skipped": f"skipped: {exc.name} does not install on this Python"}
        except (AssertionError, TimeoutExpired) as exc:
            return {"failed": str(exc)}
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    return found


def _version(program: Program) -> str:
    """Of the framework, which need not be on this process's own path."""
    if not program.beside:
        return version(program.framework)
    for each in distributions(path=[program.path]):
        if each.metadata["Name"] == program.framework:
            return each.version
    raise PackageNotFoundError(program.framework)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
