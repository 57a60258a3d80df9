"""Programs with several calls: the second program of a pair runs on the cache of the first.

Later calls after a hit matter as much as the first answer: a cold compile guards against arguments
for which its code is wrong, and lowers a backward under the settings of that moment.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.codecache import FxGraphCache
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import s3cache
from tests.perturb.judge import Verdicts
from tests.perturb.program import difference_of, record

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Call:
    """A call of the compiled function, with or without a backward.

    Attributes:
        make: returns new arguments each time.
        forward: the context of the call.
        backward: the context of the backward; ``None`` for no backward.
        keep: whether the backward keeps its graph.
    """

    make: Callable[[], tuple[Any, ...]]
    forward: Context = contextlib.nullcontext
    backward: Context | None = None
    keep: bool = False


@dataclass(frozen=True)
class History:
    """A program that fills a cache, and another one that uses it.

    Attributes:
        family, name: the kind of test, and the case.
        function: the function that both programs compile.
        first, second: the calls of each program.
        options: of ``torch.compile``.
        must_hit: whether the second program has to hit, because the difference does not matter.
        around: the context of the second program, entered before the cache is enabled.
        as_cold: whether the second program is compared with a cold compile instead of eager mode.
        native: whether Inductor generates C++. Otherwise the code calls each operator, which
            compiles in a tenth of the time, with the same guards and backwards.
        filled: a name for the cache of the first program; histories with the same name share it.
    """

    family: str
    name: str
    function: Callable[..., Any]
    first: tuple[Call, ...]
    second: tuple[Call, ...]
    options: dict[str, Any] = field(default_factory=dict)
    must_hit: bool = False
    around: Context = contextlib.nullcontext
    as_cold: bool = False
    native: bool = True
    filled: str = ""

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def judge_histories(histories: Iterable[History], verdicts: Verdicts) -> None:
    """Judge whether each second program does the same on the first one's cache as without one."""
    shelf: dict[str, str] = {}
    # Once this was set, torch keeps a precision for each library, which is part of keys.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    for history in histories:
        torch.set_flush_denormal(False)  # kernels with unsafe math turn it on, and keys differ
        with (
            tempfile.TemporaryDirectory(prefix="s3cache-perturb-") as directory,
            inductor.patch(fallback_by_default=not history.native),
        ):
            _fill(directory, history, shelf)
            with history.around():
                expected = [_observed(call, history.function) for call in history.second]
                cold, compiles = _without_a_cache(history)
                found, recompiles, hits = _with_a_cache(directory, history, history.second)
        right = cold if history.as_cold else expected
        why = _why_wrong(found, cold, right)
        if why is None and recompiles != compiles:
            why = f"compiles {recompiles} graphs, not {compiles}"
        if why is None and history.must_hit and not hits:
            why = "misses, but must hit"
        verdicts.add(history, "wrong" if why else "right" if hits else "miss", why or "")


def _fill(directory: str, history: History, shelf: dict[str, str]) -> None:
    """Fill ``directory`` with the entries that the first program saves."""
    if history.filled in shelf:
        shutil.copytree(shelf[history.filled], directory, dirs_exist_ok=True)
        return
    _with_a_cache(directory, history, history.first)
    if history.filled:
        shelf[history.filled] = tempfile.mkdtemp(prefix="s3cache-perturb-")
        shutil.copytree(directory, shelf[history.filled], dirs_exist_ok=True)


def _why_wrong(found: list[Any], cold: list[Any], expected: list[Any]) -> str | None:
    """Return where a hit differs from the expected result and from torch without a cache."""
    for number, (ours, theirs, right) in enumerate(zip(found, cold, expected, strict=True)):
        why = difference_of(ours, right)
        if why and difference_of(ours, theirs):
            return f"call {number}: {why}"
    return None


def _without_a_cache(history: History) -> tuple[list[Any], int]:
    FxGraphCache.clear()  # torch's own cache may have graphs that are bypassed here
    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False):
        return _compiled(history, history.second)


def _with_a_cache(
    directory: str, history: History, calls: tuple[Call, ...]
) -> tuple[list[Any], int, int]:
    FxGraphCache.clear()  # before s3cache is enabled: later this would clear its entries too
    with s3cache.enabled(local_dir=directory) as cache:
        found, compiles = _compiled(history, calls)
        stats = cache.stats()
    return found, compiles, sum(stats.hits.values()) + sum(stats.fx.hits.values())


def _compiled(history: History, calls: tuple[Call, ...]) -> tuple[list[Any], int]:
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    try:
        function = torch.compile(history.function, **history.options)
        found = [_observed(call, function) for call in calls]
    finally:
        torch._dynamo.reset()
    return found, counters["stats"]["unique_graphs"] - before


def _observed(call: Call, function: Callable[..., Any]) -> Any:
    args = call.make()
    try:
        with call.forward():
            result = function(*args)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if call.backward is not None:
            with call.backward():
                loss = sum(
                    (each.float() * torch.arange(1.0, 1 + each.numel()).view(each.shape)).sum()
                    for each in outputs
                    if isinstance(each, Tensor) and each.requires_grad
                )
                assert isinstance(loss, Tensor)
                loss.backward(retain_graph=call.keep)
    except Exception as exc:
        return f"raises {type(exc).__name__}"  # the order in torch's message is not fixed
    tensors = [each for each in args if isinstance(each, Tensor)]
    grads = [each.grad for each in tensors if each.is_leaf]
    return [record(part) for each in (*outputs, *tensors, *grads) for part in _parts(each)]


def _parts(value: Any) -> list[Any]:
    """Return the tensors inside a wrapper subclass, or the value itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    held = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [part for each in held for part in _parts(each)]
