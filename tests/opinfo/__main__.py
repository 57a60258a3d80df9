"""Compile the first sample of every operator, hit it on another machine, and compare.

    python -m tests.opinfo [--folder build/opinfo] [--chunk 25] [--only NAME ...]

What is done is kept in the folder: run again, it goes on where it was ended. Ends with 1 if
anything is wrong, or missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.opinfo.verdicts import Verdict, report, verdict
from tests.support.machines import Machine, remote_url

PROCESS_TIMEOUT_S = 1800


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo")
    parser.add_argument("--folder", type=Path, default=Path("build/opinfo"))
    parser.add_argument("--chunk", type=int, default=25, help="operators in one process")
    parser.add_argument("--only", nargs="*", help="these operators")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    options.folder = options.folder.resolve()  # URLs are made of it
    names = options.only or _names(options.folder)
    verdicts: dict[str, tuple[Verdict, str]] = {}
    for done in _chunks(options.folder, names, options.chunk):
        verdicts.update(done)
        print(f"{len(verdicts)} of {len(names)}", flush=True)
    print(*report(verdicts), sep="\n")
    return int(any(found in ("wrong", "missed") for found, _ in verdicts.values()))


def _names(folder: Path) -> list[str]:
    kept = folder / "names.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as root:
            found = Machine(Path(root)).run("tests.opinfo.jobs:names_of_all").result
        kept.write_text(json.dumps(found))
    return list(json.loads(kept.read_text()))


def _chunks(folder: Path, names: list[str], size: int) -> Iterator[dict[str, tuple[Verdict, str]]]:
    for start in range(0, len(names), size):
        chunk = names[start : start + size]
        kept = folder / f"{size}-{start}.json"
        if not kept.exists() or list(json.loads(kept.read_text())) != chunk:
            kept.write_text(json.dumps(_judged(folder, chunk)))
        yield {name: (found, why) for name, (found, why) in json.loads(kept.read_text()).items()}


def _judged(folder: Path, names: list[str]) -> dict[str, tuple[Verdict, str]]:
    """Verdicts on a chunk; if it ends its process, on its operators one by one."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            first, second = run_twice(Path(root), folder / "compiler", names, backward=False)
    except AssertionError as exc:
        if len(names) > 1:
            return {name: each for one in names for name, each in _judged(folder, [one]).items()}
        return {names[0]: ("wrong", f"ends the process: {str(exc)[-500:]}")}
    return {name: verdict(first[name], second[name]) for name in names}


def run_on(place: Path, root: Path, names: list[str], *, shared: bool, backward: bool) -> Any:
    """Return what a machine at ``place`` finds, in a process with s3cache or without."""
    results = root / ("results" if shared else "results alone")
    results.mkdir(exist_ok=True)
    headers = str(int(place.name != "second"))
    # Some samples are taken from sets.
    machine = Machine(place, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=headers, PYTHONHASHSEED="0")
    return machine.run(
        "tests.opinfo.jobs:run",
        names,
        str(results),
        backward,
        remote=remote_url(root) if shared else None,
        timeout_s=PROCESS_TIMEOUT_S,
    ).result


def run_twice(root: Path, compiler: Path, names: list[str], *, backward: bool) -> tuple[Any, Any]:
    """What two machines find, the second of which only has the remote.

    Args:
        compiler: disk of the first; its precompiled headers are of use for the next chunk.
    """
    shutil.rmtree(compiler / "local", ignore_errors=True)
    first, second = (
        run_on(place, root, names, shared=True, backward=backward)
        for place in (compiler, root / "second")
    )
    return first, second


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
