"""Compile the first sample of each operator, hit it on another machine, and compare results.

    python -m tests.opinfo [--chunk 25] [--only NAME ...]

Exits with status 1 if a result is wrong, or a graph missed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tests.support.machines import Machine, remote_url

PROCESS_TIMEOUT_S = 1800

Verdict: TypeAlias = Literal["hit", "bypassed", "no-graph", "not-compilable", "wrong", "missed"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo")
    parser.add_argument("--chunk", type=int, default=25, help="operators in one process")
    parser.add_argument("--only", nargs="*", help="these operators")
    options = parser.parse_args(arguments)
    verdicts: dict[str, tuple[Verdict, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = options.only or Machine(root / "names").run("tests.opinfo.jobs:names_of_all").result
        for start in range(0, len(names), options.chunk):
            verdicts.update(_judged(root, names[start : start + options.chunk]))
            print(f"{len(verdicts)} of {len(names)}", flush=True)
    print(*report(verdicts), sep="\n")
    return int(any(found in ("wrong", "missed") for found, _ in verdicts.values()))


def _judged(folder: Path, names: list[str]) -> dict[str, tuple[Verdict, str]]:
    """Return verdicts on a chunk of operators, or on one by one if they end the process."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            first, second = run_twice(Path(root), folder / "compiler", names, backward=False)
    except AssertionError as exc:
        if len(names) > 1:
            return {name: each for one in names for name, each in _judged(folder, [one]).items()}
        return {names[0]: ("wrong", f"ends the process: {str(exc)[-500:]}")}
    return {name: verdict(first[name], second[name]) for name in names}


def run_twice(
    root: Path, compiler: Path, names: list[str], *, backward: bool, forked: bool = False
) -> list[Any]:
    """Return the results of two machines, which share only the remote.

    Args:
        compiler: the disk of the first machine; the next chunk reuses its precompiled headers.
        forked: whether the machines' processes are forks with different hash seeds.
    """
    shutil.rmtree(compiler / "local", ignore_errors=True)
    results = root / "results"
    results.mkdir()
    found = []
    for number, place in enumerate((compiler, root / "second")):
        # Some samples come from sets, and their order depends on hashes.
        headers = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "01"[not number]}
        environment = {} if forked else {"PYTHONHASHSEED": "0", **headers}
        ran = Machine(place, **environment).run(
            "tests.opinfo.jobs:run",
            *(names, str(results), backward),
            remote=remote_url(root),
            server=number if forked else None,
            timeout_s=PROCESS_TIMEOUT_S,
        )
        found.append(ran.result)
    return found


def verdict(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Judge an operator by the results of the machine that compiled it and of the one that hit it.

    * ``hit``: every graph was saved, hit and not compiled again, and the results are equal
    * ``bypassed``: a graph was bypassed, and the results are equal
    * ``no-graph``: no graph was compiled
    * ``not-compilable``: torch has no sample, fails, or cannot compile it
    * ``missed``, ``wrong``: failures
    """
    if first["status"] not in ("compiled", "inaccurate"):
        same = second["status"] == first["status"]
        return ("not-compilable" if same else "wrong"), f"{first['status']}: {first['why']}"
    if second["status"] != first["status"] or not second["equal"]:
        why = second["why"] or "the results of the two machines differ"
        return "wrong", f"{second['status']}: {why}"
    saved, hit = first["counts"], second["counts"]
    if saved["bypassed"] or hit["bypassed"]:
        return "bypassed", " ".join(first["reasons"])
    shared = saved["saved"] + saved["hits"]
    if not first["lowered"] and not shared:
        return "no-graph", ""
    if hit["hits"] == shared and not second["lowered"] and not hit["misses"]:
        return "hit", "" if first["status"] == "compiled" else f"inaccurate: {first['why']}"
    return "missed", f"{shared} graphs shared, {hit['hits']} hit, {second['lowered']} compiled"


def report(verdicts: Mapping[str, tuple[Verdict, str]]) -> list[str]:
    """Return lines with the number of operators for each verdict, and all failures."""
    counts = Counter(found for found, _ in verdicts.values())
    lines = [f"{count:5} {name}" for name, count in counts.most_common()]
    reasons = Counter(why for found, why in verdicts.values() if found == "bypassed")
    lines += [f"{count:5} bypassed: {why}" for why, count in reasons.most_common()]
    bad = {name: each for name, each in verdicts.items() if each[0] in ("wrong", "missed")}
    return lines + [f"{name}: {found}: {why}" for name, (found, why) in sorted(bad.items())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
