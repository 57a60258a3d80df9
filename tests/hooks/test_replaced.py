"""Functions that replaced some of torch's keep only graphs that call them from the first level."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3cache.torch_api import installed_release
from tests.support.children import in_child
from tests.support.machines import Machine, remote_url
from tests.support.marks import cases, selected, slow

# Each replacement takes a number, and each program depends on it if it calls the replacement. torch
# is imported by the jobs.


def _no_calls(by: float) -> None:
    """Replace what vLLM replaces on a processor, in its ways."""
    import torch

    class Event:
        def __init__(self, *_: Any) -> None:
            self.number = by

    numbers = [by]

    def set_num_threads(number: int) -> None:
        numbers.append(number)

    torch.Tensor.pin_memory = lambda self, *_: self * by  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    torch.set_num_threads = set_num_threads  # type: ignore[assignment]
    torch.Event = Event  # type: ignore[assignment, misc]


def _scaled(owner: str, name: str, by: float) -> None:
    import torch._refs

    place = getattr(torch, owner) if owner else torch
    original = getattr(place, name)
    setattr(place, name, lambda *args, **kwargs: original(*args, **kwargs) * by)


def _through_another(by: float) -> None:
    import torch

    _scaled("Tensor", "softmax", by)
    torch.layer_norm = lambda x, *_: x.softmax(-1)


def _class(by: float) -> None:
    import torch

    def init(self: Any, _: Any) -> None:
        self.min = self.max = by

    members: dict[str, Any] = {"__init__": init}
    torch.finfo = type("finfo", (), members)  # type: ignore[misc, assignment]


def _sine(x: Any) -> Any:
    return x.sin() + 1


def _pinned(x: Any) -> Any:
    return x.pin_memory() + 1


def _normed(x: Any) -> Any:
    from torch.nn import functional

    return functional.layer_norm(x, (4,))


def _sinc(x: Any) -> Any:
    import torch

    return torch.sinc(x)


def _by_name(x: Any) -> Any:
    return getattr(x, "soft" + "max")(-1)


def _without_nan(x: Any) -> Any:
    return (x / 0).nan_to_num()


_INLINED: dict[str, tuple[Callable[[float], None], Callable[[Any], Any]]] = {
    "method": (_no_calls, _pinned),
    "method by name": (functools.partial(_scaled, "Tensor", "softmax"), _by_name),
}
_CALLED: dict[str, tuple[Callable[[float], None], Callable[[Any], Any]]] = {
    "by a function in the graph": (functools.partial(_scaled, "", "layer_norm"), _normed),
    "by a decomposition": (functools.partial(_scaled, "_prims", "sin"), _sinc),
    "through another": (_through_another, _normed),
    "a class": (_class, _without_nan),
}

_SIMILAR = {"by a function in the graph", "through another", "a class"}


def _in_fork(work: Callable[[], Any]) -> Any:
    found, error = in_child(work, timeout_s=600, log=os.devnull)
    return error or found


def _compiled(program: Callable[[Any], Any], *, caches: bool = True) -> dict[str, Any]:
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    import s3cache

    cache = s3cache.active()
    assert cache is not None
    before = cache.stats()
    x = torch.linspace(-2, 2, 16).reshape(4, 4).requires_grad_()
    with (
        functorch.patch(enable_autograd_cache=caches),
        inductor.patch(fx_graph_cache=caches, fallback_by_default=True),
    ):
        result = torch.compile(program)(x)
        result.backward(torch.ones_like(result))
    after = cache.stats()
    return {
        "result": f"{result.flatten().tolist()} {x.grad.flatten().tolist()}",  # type: ignore[union-attr]
        "saved": after.saved - before.saved,
        "hits": sum(after.hits.values()) - sum(before.hits.values()),
        "second level": sum(after.fx.hits.values()) + after.fx.saved > 0,
        "reasons": [*after.bypass_reasons, *after.not_saved],
    }


def _with(
    replace: Callable[[float], None], by: float, program: Callable[[Any], Any], **kw: Any
) -> Any:
    replace(by)
    return _compiled(program, **kw)


def _results(names: list[str]) -> dict[str, Any]:
    """Return what each program gave on another one's cache, and without a cache."""
    importlib.import_module("torch._inductor.compile_fx")  # once for all forks
    each = {**_INLINED, **_CALLED}
    chosen = {"nothing": (_no_calls, _sine), **{name: each[name] for name in names}}
    return {
        name: [
            _in_fork(functools.partial(_with, replace, 2.0, program)),
            _in_fork(functools.partial(_with, replace, 3.0, program)),
            _in_fork(functools.partial(_with, replace, 3.0, program, caches=False)),
        ]
        for name, (replace, program) in chosen.items()
    }


def _over_time() -> dict[str, Any]:
    """Return what processes did that replace a function, or put it back, between compiles."""
    importlib.import_module("torch._inductor.compile_fx")
    return {"history": _in_fork(_history), "late": _in_fork(_late)}


def _late() -> list[Any]:
    """Replace a function after the first compile of the process: torch remembers results."""
    first = _compiled(_sinc)
    return [first, _with(_no_calls, 2.0, _sine)]


def _history() -> list[Any]:
    """Put a function back for one compile."""
    import torch

    original = torch.layer_norm
    _scaled("", "layer_norm", 5.0)
    mine, found = torch.layer_norm, [_compiled(_sine)]
    torch.layer_norm = original
    found.append(_compiled(_normed))
    torch.layer_norm = mine
    return [*found, _compiled(lambda x: x.cos() + 2)]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root, names = tmp_path_factory.mktemp("machine"), [*selected(request, "name")]
    done = Machine(root).run(f"{__name__}:_results", names, remote=remote_url(root))
    found: dict[str, Any] = done.result
    return found


def test_a_replacement_that_no_compile_calls_keeps_no_graph_from_the_first_level(
    results: dict[str, Any],
) -> None:
    first, second, cold = results["nothing"]
    assert (first["saved"], first["hits"], first["reasons"]) == (1, 0, [])
    assert (second["saved"], second["hits"]) == (0, 1)
    assert first["result"] == second["result"] == cold["result"]


@slow  # Dynamo traces them like functions of the program
@pytest.mark.parametrize("name", _INLINED)
def test_a_replacement_that_dynamo_inlines_is_in_the_graph(
    name: str, results: dict[str, Any]
) -> None:
    first, second, cold = results[name]
    # torch itself runs it while it compiles.
    is_run = name == "method by name" and installed_release() >= (2, 15)
    for each in (first, second):
        assert (each["saved"], each["reasons"]) == ((0, ["override"]) if is_run else (1, []))
    assert first["result"] != second["result"] == cold["result"]


@pytest.mark.parametrize("name", cases(_CALLED, slow_ones=_SIMILAR))
def test_a_graph_of_which_the_compile_calls_a_replacement_is_shared_at_the_second_level(
    name: str, results: dict[str, Any]
) -> None:
    """Nothing in the graph says so, and its name is looked up in many ways."""
    first, second, cold = results[name]
    assert second["result"] == cold["result"]
    assert first["saved"] == second["saved"] == second["hits"] == 0
    assert first["second level"]
    assert "override" in first["reasons"]


@slow
def test_a_replacement_that_was_not_there_during_all_compiles_may_have_been_called(
    tmp_path: Path,
) -> None:
    """torch may remember what its own function returned."""
    machine = Machine(tmp_path / "machine")
    results = machine.run(f"{__name__}:_over_time", remote=remote_url(tmp_path)).result
    assert [each["saved"] for each in results["late"]] == [1, 0]
    assert [each["saved"] for each in results["history"]] == [1, 0, 0]
