"""Torch's own samples of its operators, as cases: every graph must hit, with equal results.

    python -m tests.equal.operators [--chunk 25] [--only NAME ...]

Compiles the first sample of each operator, hits it on another machine, and compares results. Exits
with status 1 if a result is wrong, or a graph missed.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from tests.equal.cases import CASES, Case
from tests.equal.observe import SEEN, difference
from tests.equal.programs import Compile
from tests.support.machines import Machine, remote_url

PROCESS_TIMEOUT_S = 1800
BACKWARD = "backward of "


def _program(operator: Any, backward: bool, compile_it: Compile) -> list[Any]:
    """Return outputs, mutated inputs and gradients of the first sample."""
    _seed()
    try:
        sample = next(iter(operator.sample_inputs("cpu", torch.float32, requires_grad=backward)))
    except StopIteration:
        raise LookupError("no sample") from None

    def function(*args: Any, **kwargs: Any) -> Any:
        return operator.op(*args, **kwargs)

    _seed()
    with torch._inductor.config.patch(fallback_random=True):
        outputs = compile_it(function)(sample.input, *sample.args, **sample.kwargs)
        if "empty" in operator.name.split("_"):
            for each in tree_leaves(outputs):
                each.detach().zero_()  # its shape and strides are defined, its values are not
        inputs = tree_leaves((sample.input, sample.args, sample.kwargs))
        gradients = _gradients(tree_leaves(outputs), inputs) if backward else []
    return [*tree_leaves(outputs), *inputs, *gradients]


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def _gradients(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    reached = [e for e in outputs if isinstance(e, torch.Tensor) and e.requires_grad]
    leaves = [e for e in inputs if isinstance(e, torch.Tensor) and e.requires_grad and e.is_leaf]
    if not reached or not leaves:
        return []
    ones = [torch.ones_like(each) for each in reached]
    return list(torch.autograd.grad(reached, leaves, ones, allow_unused=True))


for _operator in op_db:
    if torch.float32 in _operator.supported_dtypes("cpu"):
        _name = _operator.formatted_name
        for _title, _backward in ((_name, False), (BACKWARD + _name, _operator.supports_autograd)):
            CASES[_title] = Case(
                "operators", _title, functools.partial(_program, _operator, _backward)
            )


def run_twice(root: Path, compiler: Path, names: list[str], *, forked: bool = False) -> list[Any]:
    """Return the results of two machines, which share only the remote.

    Args:
        compiler: the disk of the first machine; the next chunk reuses its precompiled headers.
        forked: whether the machines' processes are forks with different hash seeds.
    """
    shutil.rmtree(compiler / "local", ignore_errors=True)
    found = []
    for number, place in enumerate((compiler, root / "second")):
        # Some samples come from sets, and their order depends on hashes.
        headers = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "01"[not number]}
        environment = {} if forked else {"PYTHONHASHSEED": "0", **headers}
        ran = Machine(place, **environment).run(
            *("tests.equal.cases:run", "operators", names, remote_url(root)),
            remote=remote_url(root),
            server=number if forked else None,
            timeout_s=PROCESS_TIMEOUT_S,
        )
        found.append(ran.result)
    return found


def verdict(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, str]:
    """Judge an operator by the results of the machine that compiled it and of the one that hit it.

    * ``hit``: every graph was saved, hit and not compiled again, and the results are equal
    * ``bypassed``: a graph was bypassed, and the results are equal
    * ``no-graph``: no graph was compiled
    * ``not-compilable``: torch has no sample, fails, or cannot compile it
    * ``missed``, ``wrong``: failures
    """
    if failed := first["eager"] or first["error"]:
        same = bool(second["eager"]) == bool(first["eager"]) and second["got"] is None
        return ("not-compilable" if same else "wrong"), failed[-300:]
    if second["got"] is None:
        return "wrong", (second["eager"] or second["error"])[-300:]
    if why := difference(second["got"], first["got"], fields=SEEN, close=0):
        return "wrong", f"the results of the two machines differ: {why}"
    saved, hit = first["counts"], second["counts"]
    if saved["bypassed"] or hit["bypassed"]:
        return "bypassed", " ".join(first["reasons"])
    shared = saved["saved"] + saved["hits"]
    if not first["lowered"] and not shared:
        return "no-graph", ""
    if hit["hits"] == shared and not second["lowered"] and not hit["misses"]:
        return "hit", "".join(f"inaccurate: {each}" for each in first["differs"][:1])
    return "missed", f"{shared} graphs shared, {hit['hits']} hit, {second['lowered']} compiled"


def report(verdicts: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return lines with the number of operators for each verdict, and all failures."""
    counts = Counter(found for found, _ in verdicts.values())
    lines = [f"{count:5} {name}" for name, count in counts.most_common()]
    reasons = Counter(why for found, why in verdicts.values() if found == "bypassed")
    lines += [f"{count:5} bypassed: {why}" for why, count in reasons.most_common()]
    bad = {name: each for name, each in verdicts.items() if each[0] in ("wrong", "missed")}
    return lines + [f"{name}: {found}: {why}" for name, (found, why) in sorted(bad.items())]


def _judged(folder: Path, names: list[str]) -> dict[str, tuple[str, str]]:
    """Return verdicts on a chunk of operators, or on one by one if they end the process."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            first, second = run_twice(Path(root), folder / "compiler", names)
    except AssertionError as exc:
        if len(names) > 1:
            return {name: each for one in names for name, each in _judged(folder, [one]).items()}
        return {names[0]: ("wrong", f"ends the process: {str(exc)[-500:]}")}
    return {name: verdict(first[name], second[name]) for name in names}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.equal.operators")
    parser.add_argument("--chunk", type=int, default=25, help="operators in one process")
    parser.add_argument("--only", nargs="*", help="these operators")
    options = parser.parse_args(arguments)
    verdicts: dict[str, tuple[str, str]] = {}
    names = options.only or [name for name in CASES if not name.startswith(BACKWARD)]
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(names), options.chunk):
            verdicts.update(_judged(Path(folder), names[start : start + options.chunk]))
            print(f"{len(verdicts)} of {len(names)}", flush=True)
    print(*report(verdicts), sep="\n")
    return int(any(found in ("wrong", "missed") for found, _ in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
