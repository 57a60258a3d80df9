"""What a program has replaced of torch is in its keys; what torch made is not."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor

import s3cache
from tests.support.machines import Machine


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,)) + x.softmax(-1)


def keys() -> list[str | None]:
    report = s3cache.check(torch.compile(_normed), torch.ones(4, 4))
    return [graph.key for graph in report.graphs]


def _doubled(original: Callable[..., Any], by: float) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * by

    return wrapper


def test_what_torch_calls_below_a_graph_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = keys()
    found = []
    for owner, name in ((torch, "layer_norm"), (torch.Tensor, "softmax"), (torch._VF, "dropout")):
        for by in (2.0, 2.0, 3.0):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, _doubled(getattr(owner, name), by))
                found += keys()
    assert found[0::3] == found[1::3]
    assert len({plain, None, *found}) == 8
    assert keys() == [plain]


def test_torchs_own_in_another_place_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = keys()
    monkeypatch.setattr(torch.Tensor, "softmax", torch.Tensor.log_softmax)
    (other,) = keys()
    assert other not in (plain, None)


def test_what_torch_does_not_look_at_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys()
    ticks = itertools.count()
    monkeypatch.setattr(torch, "s3cache_mine", lambda: next(ticks), raising=False)
    monkeypatch.setattr(torch, "load", lambda *_: time.time())
    monkeypatch.setattr(torch, "layer_norm", torch.layer_norm)
    assert keys() == before


def test_what_cannot_be_followed_is_a_reason_and_can_be_vouched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "layer_norm", _timed)
    (graph,) = s3cache.check(torch.compile(_normed), torch.ones(4, 4)).graphs
    (reason,) = graph.reasons
    assert reason.code == "override"
    assert "torch.layer_norm" in reason.message
    s3cache.register_cacheable(_timed, version="1")
    assert keys() != [None]


def _timed(*args: Any) -> Any:
    norm: Any = torch.native_layer_norm
    return norm(*args[:4], 1e-5)[0] * time.time()


def _keys_of_machine() -> list[list[str | None]]:
    """Replaced before anybody has had a look at torch, and put back."""
    original = torch.layer_norm
    torch.layer_norm = _doubled(original, 2.0)
    replaced = keys()
    torch.layer_norm = original
    return [replaced, keys()]


@pytest.mark.timeout(900)
def test_keys_are_the_same_however_early_torch_was_seen(tmp_path: Path) -> None:
    """Without the entry point torch is seen late: by itself it says as little, changed as much."""
    environments = {"early": {}, "late": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
    early, late = (
        Machine(tmp_path / name, **environment).run(f"{__name__}:_keys_of_machine").result
        for name, environment in environments.items()
    )
    assert early == late
    assert early[0] != early[1]
    assert [None] not in early
