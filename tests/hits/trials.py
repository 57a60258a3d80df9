"""Programs run in forks of a process that has imported torch and done nothing else."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import multiprocessing
import os
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config

import s3cache
from tests.hits.sketches import COLUMNS, INPUTS, Call, Sketch

__all__ = ["Bench", "Verdict"]

_TIMEOUT_S = 300
_MUTATES = re.compile(rf"= [{''.join(INPUTS)}](\[|\.t\(\)\.neg_|\.\w+_\()")


@dataclass(frozen=True)
class Verdict:
    """What became of a changed program that finds what was saved for another one.

    Attributes:
        kind: ``broken`` (it does not even run), ``miss`` (no key in common), ``unsaved`` (there
            was nothing to find), ``right`` or ``wrong``.
        why: of a wrong one, what differs from a compile with no cache.
    """

    kind: str
    why: str = ""


class Bench:
    """Where programs are tried, one after the other. Compiled C++ is kept, by its source."""

    def __init__(self, root: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.compile_fx")  # once, and not in each fork
        self._root = root
        self._forks = multiprocessing.get_context("fork")

    def judge(self, program: Sketch, changed: Sketch) -> Verdict:
        """Save what ``program`` compiles, and let ``changed`` find it."""
        keys = [self._try(_keys, each) for each in (program, changed)]
        if None in keys:
            return Verdict("broken")
        # A graph without a key may be found at the second level.
        if not {*keys[0]} & {*keys[1]}:
            return Verdict("miss")
        if self._try(_eager, changed) is None:
            return Verdict("broken")
        with tempfile.TemporaryDirectory(dir=self._root) as store:
            saved = self._try(_cached, program, store, "read-write")
            if saved is None or not saved["saved"]:
                return Verdict("unsaved")
            found = self._try(_cached, changed, store, "read-only")
        if found is not None and not found["hits"]:
            return Verdict("miss")
        cold = self._try(_cold, changed)
        if cold is None:
            return Verdict("broken")
        if found is None:
            return Verdict("wrong", "it fails")
        if why := _difference(found["calls"], cold["calls"], "calls"):
            return Verdict("wrong", why)
        if found["graphs"] < cold["graphs"]:
            return Verdict("wrong", f"{found['graphs']} graphs instead of {cold['graphs']}")
        return Verdict("right")

    def _try(self, task: Callable[..., Any], *arguments: Any) -> Any:
        """What the task comes to in a fork; ``None`` where it fails."""
        for cache in ("aotautograd", "fxgraph"):  # torch's own
            shutil.rmtree(self._root / "inductor" / cache, ignore_errors=True)
        ours, theirs = self._forks.Pipe(duplex=False)
        child = self._forks.Process(target=self._fork, args=(theirs, task, arguments))
        child.start()
        theirs.close()
        answer = None
        try:
            if ours.poll(_TIMEOUT_S):
                answer = ours.recv()
        except EOFError:
            pass
        finally:
            child.kill()
            child.join()
            ours.close()
        return answer

    def _fork(self, pipe: Any, task: Callable[..., Any], arguments: Any) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._root / "inductor")
        tempfile.tempdir = str(self._root)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        try:
            with open(self._root / "log", "a", encoding="utf-8") as log:
                os.dup2(log.fileno(), 2)
                pipe.send(task(*arguments))
        except BaseException:
            traceback.print_exc()
        os._exit(0)


# -- what forks do


def _keys(sketch: Sketch) -> list[str | None]:
    with _module(sketch) as module:
        function = torch.compile(module.program, dynamic=sketch.dynamic)
        arguments = _arguments(sketch, sketch.calls[0], 0)
        return [graph.key for graph in s3cache.check(function, *arguments).graphs]


def _eager(sketch: Sketch) -> Any:
    with _module(sketch) as module:
        return _called(sketch, module.program)


def _cold(sketch: Sketch) -> Any:
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False
    return _compiled(sketch)


def _cached(sketch: Sketch, store: str, mode: Any) -> Any:
    url = f"file://{store}?create=1"
    with s3cache.enabled(url, mode=mode, local=False, shape_profile=False) as cache:
        came_to = _compiled(sketch)
        assert not cache.flush(60).remaining
        stats = cache.stats()
    hits = sum(stats.hits.values()) + sum(stats.fx.hits.values())
    return {**came_to, "saved": stats.saved + stats.fx.saved, "hits": hits}


def _compiled(sketch: Sketch) -> dict[str, Any]:
    with _module(sketch) as module:
        calls = _called(sketch, torch.compile(module.program, dynamic=sketch.dynamic))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"calls": calls, "graphs": graphs}


@contextlib.contextmanager
def _module(sketch: Sketch) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "fuzzed.py")
        path.write_text(sketch.source)
        spec = importlib.util.spec_from_file_location("fuzzed", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def _called(sketch: Sketch, function: Callable[..., Any]) -> list[Any]:
    return [_call(sketch, function, call, number) for number, call in enumerate(sketch.calls)]


def _call(sketch: Sketch, function: Callable[..., Any], call: Call, number: int) -> list[Any]:
    """Outputs, inputs and gradients of one call, as numbers."""
    arguments = _arguments(sketch, call, number)
    outputs = function(*arguments)
    wanted = [output.float().sum() for output in outputs if output.requires_grad]
    if wanted:
        exec(call.setting, {"torch": torch})
        sum(wanted[1:], wanted[0]).backward()
    tensors = [*outputs, *arguments, *(argument.grad for argument in arguments)]
    return [None if each is None else each.detach().tolist() for each in tensors]


def _arguments(sketch: Sketch, call: Call, number: int) -> list[Any]:
    torch.manual_seed(number)
    grad = sketch.mode != "no_grad()" and not any(map(_MUTATES.search, sketch.steps))
    made = [_laid_out(call.rows, layout) for layout in call.layouts]
    made[1] = _related(made[0], made[1], call.relation)
    leaves: dict[int, Any] = {}  # one tensor given twice stays one
    return [leaves.setdefault(id(each), each.requires_grad_(grad)) for each in made]


def _laid_out(rows: int, layout: str) -> Any:
    if layout == "offset":
        return torch.randn(rows * COLUMNS + 5)[5:].view(rows, COLUMNS)
    if layout == "transposed":
        return torch.randn(COLUMNS, rows).t()
    if layout == "strided":
        return torch.randn(rows, 2 * COLUMNS)[:, ::2]
    return torch.randn(rows, COLUMNS)


def _related(first: Any, second: Any, relation: str) -> Any:
    if relation == "apart":
        return second
    if relation == "same":
        return first
    if relation == "value":
        return first.detach()
    rows, flat = len(first), torch.randn(3 * first.numel())
    count = first.numel()
    first.set_(flat.untyped_storage(), 0, first.shape, (COLUMNS, 1))
    if relation == "overlap":
        return flat[COLUMNS : COLUMNS + count].view(rows, COLUMNS)
    if relation == "neighbour":
        return flat[count : 2 * count].view(rows, COLUMNS)
    first.set_(flat.untyped_storage(), 0, first.shape, (2 * COLUMNS, 1))
    return flat.as_strided((rows, COLUMNS), (2 * COLUMNS, 1), COLUMNS)


def _difference(found: Any, expected: Any, where: str) -> str:
    """Where two records differ by more than the last digits; empty if they do not."""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"{where} has {len(found)} parts, not {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if why := _difference(one, other, f"{where}[{index}]"):
                return why
        return ""
    if found == expected or _both_nan(found, expected):
        return ""
    numbers = isinstance(found, float) and isinstance(expected, float)
    if numbers and math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-4):
        return ""
    return f"{where} is {found}, not {expected}"


def _both_nan(one: Any, other: Any) -> bool:
    floats = isinstance(one, float) and isinstance(other, float)
    return floats and math.isnan(one) and math.isnan(other)
