"""Run the frameworks' programs on machines, and write the table of docs/frameworks.md.

    python -m tests.frameworks [--quick] [--only NAME ...] [--folder build/frameworks] [--page PAGE]

Each program runs six times: twice without s3cache on one disk; twice with s3cache on one disk, once
enabled by ``python -m s3cache run`` and once by two lines of code; and on two empty machines,
enabled by ``run`` and by ``S3CACHE_URL`` only. ``--quick`` omits second processes, and one of the
two empty machines. The folder keeps finished results: a second call continues there; delete the
folder to start again. Exits with status 1 if a program does not start warm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from benchmarks.render import fill
from tests.frameworks.trials import PROGRAMS, ROOT, RUNS, Program, complaints, run_program

QUICK = ("alone", "first", "third")
COLUMNS = (
    "framework", "program", "hits: graphs + FX graphs", "misses", "bypasses", "lowered",
    "compilers", "losses", "same disk: lowered, torch alone", "seconds, cold → elsewhere",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks")
    parser.add_argument("--folder", type=Path, default=Path("build/frameworks"))
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS), help="these programs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "frameworks.md")
    parser.add_argument(
        "--quick", action="store_true", help="three runs of each program instead of six"
    )
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    options.folder = options.folder.resolve()  # URLs contain it
    bad = False
    results = {name: _read(options.folder, name) for name in PROGRAMS}
    for name in options.only or PROGRAMS:
        print(f"{name}: {PROGRAMS[name].does}", flush=True)
        runs: Collection[str] = QUICK if options.quick else RUNS
        found = results[name] = _kept(options.folder, name, runs)
        failed = [found["failed"]] if "failed" in found else []
        for complaint in (*failed, *(complaints(found["trials"]) if "trials" in found else ())):
            bad = True
            print(f"  NOT AS IT SHOULD BE: {complaint}", flush=True)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(fill(page, "bench:frameworks", _table(results)), encoding="utf-8")
    return int(bad)


def _read(folder: Path, name: str) -> dict[str, Any]:
    kept = folder / f"{name}.json"
    return dict(json.loads(kept.read_text())) if kept.exists() else {}


def _kept(folder: Path, name: str, runs: Collection[str]) -> dict[str, Any]:
    """Return the program's results, or ``skipped`` with the reason, or ``failed``."""
    if not (found := _read(folder, name)):
        program = PROGRAMS[name]
        try:
            found = {"version": _version(program), "torch": version("torch"), "trials": {}}
            with tempfile.TemporaryDirectory(dir=folder) as root:
                ran = run_program(Path(root), name, program, runs, headers=folder / "compiler")
                for what, trial in ran:
                    seen = {each: count for each, count in trial.items() if each != "losses"}
                    print(f"  {what}: {seen}", flush=True)
                    found["trials"][what] = trial
        except PackageNotFoundError as exc:
            return {"skipped": f"skipped: {exc.name} does not install on this Python"}
        except (AssertionError, TimeoutExpired) as exc:
            return {"failed": str(exc)}
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    return found


def _version(program: Program) -> str:
    """Return the version of the framework, which may not be on this process's path."""
    if not (program.beside or program.environment):
        return version(program.framework)
    packages = Path(program.python).parents[1].glob("lib/python*/site-packages")
    for each in distributions(path=[program.path or sys.prefix, *map(str, packages)]):
        if each.metadata["Name"] == program.framework:
            return each.version
    raise PackageNotFoundError(program.framework)


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row for each program."""
    rows: list[Collection[str]] = [COLUMNS, ["---"] * len(COLUMNS)]
    rows += [_row(PROGRAMS[name], found) for name, found in results.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    releases = sorted({found["torch"] for found in results.values() if "torch" in found})
    measured = ["", f"Measured by `make test-frameworks` with torch {', '.join(releases)}.", ""]
    return "\n".join([*lines, *measured])


def _row(program: Program, found: Mapping[str, Any]) -> list[str]:
    if "trials" not in found:
        why = found.get("skipped", "**failed**" if "failed" in found else "not run")
        return [program.framework, program.does, why, *[""] * (len(COLUMNS) - 3)]
    trials = found["trials"]
    # With --quick, only one of these two machines runs, and no second process.
    second = trials.get("second") or trials["third"]
    lowered = [trials[what]["lowered"] for what in ("first again", "alone again") if what in trials]
    equal = len({tuple(trial["losses"]) for trial in trials.values()}) == 1
    return [
        f"{program.framework} {found['version']}",
        program.does,
        f"{second['hits']} + {second['half_hits']}",
        _by_reason(second["misses"]),
        _by_reason(second["reasons"]),
        str(second["lowered"]),
        str(second["compilers"]),
        "equal" if equal else "**differ**",
        ", ".join(map(str, lowered)) or "not run",
        f"{trials['first']['seconds']:.0f} → {second['seconds']:.0f}",
    ]


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} `{reason}`" for reason, count in sorted(counts.items())) or "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
