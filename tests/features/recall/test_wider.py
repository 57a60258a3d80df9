"""Frames that ordinary programs have, and that need more than a value at a place, are recalled.

The programs of the table change what they read. Here each frame is compiled on one machine, and
must be recalled, with the same results, by another one where strings have other hashes.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import s3cache
from tests.support.machines import Machine, remote_url

NAMES = {"sin", "cos", "tan", "exp", "abs"}
PAIRS = {("sin", 1), ("cos", 2), ("tan", 3)}
PAIR = collections.namedtuple("PAIR", "some others")  # noqa: PYI024 - the older way


@dataclasses.dataclass
class Config:
    """A configuration."""

    scale: int = 2
    shift: float = 0.5


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class Keeps(torch.nn.Module):
    """A module that keeps a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        """Return the sum of everything seen so far."""
        self.seen.append(x * 2)
        return sum(self.seen)


CONFIG = Config()
A, B = torch.ones(4), torch.ones(4)
TABLE = {A: 2, B: 3}


def _signed(x: Any, scale: int | None = 3) -> Any:
    return x * scale


def _times(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * 2


def _attention(x: Any) -> Any:
    q = torch.ones(1, 1, 128, 16) * x[0]
    return flex_attention(q, q, q, score_mod=_times)


def _with_table(x: Any) -> Any:
    return x * TABLE[B] + A


FRAMES: dict[str, Callable[[Any], Any]] = {
    "named tuple": lambda x: PAIR(x + 1, x + 2),
    "typed named tuple": lambda x: Point(x + 1, x + 2),
    "structure of torch": lambda x: torch.max(x.reshape(2, 2), dim=0),
    "dataclass as a dictionary": lambda x: x * dataclasses.asdict(CONFIG)["scale"],
    "signature": lambda x: x * inspect.signature(_signed).parameters["scale"].default,
    "item of a set": lambda x: x + (1 if "tan" in NAMES else 2),
    "loop over a union": lambda x: sum(x + ord(name) for name in {"a", "b"} | {"c", "d"}),
    "loop over keys of tables": lambda x: sum(
        x + ord(name) for name in {"a": 1, "b": 2}.keys() | {"c": 3}.keys()
    ),
    "item of a set of pairs": lambda x: x + (1 if ("sin", 1) in PAIRS else 2),
    "table by tensors": _with_table,
    "type of None": lambda x: x + (1 if issubclass(type(None), object) else 2),
    "flex attention": _attention,
}
OTHERS = ("list of a module", "other number of dimensions", "AdamW", "SGD")
IN_ORDER: dict[str, Callable[[Any], Any]] = {
    "loop over a set": lambda x: sum(x + len(name) for name in NAMES),
    "list of a set": lambda x: x + len([*NAMES, "none"][0]),
    "item of a set that is made": lambda x: x + ord({"a", "b"}.pop()),
    "loop over a difference": lambda x: sum(x * ord(name) + 1 for name in {"a", "b"} ^ {"c", "d"}),
    "loop over a constant set": lambda x: sum(x + ord(name) for name in {"a", "b", "c"}),
}


def compile_all(url: str) -> dict[str, Any]:
    """Compile each frame; return what recall counted, and the results."""
    found: dict[str, Any] = {"seed": hash("recall")}
    torch.manual_seed(0)
    for name, frame in {**FRAMES, **IN_ORDER}.items():
        found[name] = _observed(url, partial(torch.compile(frame), torch.ones(4)))
    found["list of a module"] = _observed(url, _kept)
    found["other number of dimensions"] = _observed(url, _reshaped)
    for kind in ("AdamW", "SGD"):
        found[kind] = _observed(url, partial(_trained, kind))
    found["tensors that live"] = _observed(url, _living)
    return found


def _kept() -> list[Any]:
    compiled = torch.compile(Keeps())
    return [compiled(torch.ones(4)) for _ in range(2)]


def _reshaped() -> list[Any]:
    """Let Dynamo vary a size that the code fixes again."""
    weight = torch.ones(8, 8)
    compiled = torch.compile(lambda x: x @ weight)
    return [compiled(torch.ones(*size, 8)) for size in ((3,), (2, 3))]


def _living() -> list[object]:
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    step = torch.compile(optimizer.step)
    for _ in range(3):
        layer(torch.ones(3, 4)).square().sum().backward()
        step()
    watched = [layer.weight, optimizer.state[layer.weight]["exp_avg"]]
    references = [*map(weakref.ref, watched)]
    del layer, optimizer, step, watched
    gc.collect()
    return [living for each in references if (living := each()) is not None]


def _trained(kind: str) -> list[Any]:
    layer = torch.nn.Linear(4, 2)
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1)
    step = torch.compile(optimizer.step)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(3, 4)).square().sum().backward()
        step()
    assert not optimizer.state or kind == "AdamW"
    return [*layer.parameters()]


def _observed(url: str, run: Callable[[], Any]) -> tuple[dict[str, int], str]:
    torch.manual_seed(0)
    torch.compiler.reset()
    with s3cache.enabled(url, recall="on") as cache:
        result = run()
        counts = cache.stats().features["recall"]
    return {name: int(count) for name, count in counts.items()}, str(result)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("wider")
    return [
        Machine(root / f"machine-{number}", PYTHONHASHSEED=str(number))
        .run(f"{__name__}:compile_all", _remote(root))
        .result
        for number in (1, 2)
    ]


def _remote(root: Path) -> str:
    (root / "remote").mkdir(exist_ok=True)
    return remote_url(root)


@pytest.mark.parametrize("name", [*FRAMES, *OTHERS])
def test_the_frame_is_recalled_on_another_machine(
    name: str, machines: list[dict[str, Any]]
) -> None:
    (first, result), (second, other) = (machine[name] for machine in machines)
    assert first["saved"] >= 1
    assert second["recalled"] == first["saved"]
    assert second["refused"] == second["saved"] == 0
    assert result == other


def test_a_recalled_step_keeps_no_tensor_of_a_dead_optimizer(
    machines: list[dict[str, Any]],
) -> None:
    counts, living = machines[1]["tensors that live"]
    assert counts["recalled"] >= 1
    assert living == "[]"


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_frame_that_uses_the_order_of_a_set_is_not_recalled(
    name: str, machines: list[dict[str, Any]]
) -> None:
    (first, _), (second, _) = (machine[name] for machine in machines)
    assert machines[0]["seed"] != machines[1]["seed"]
    assert second["recalled"] == 0, (first, second)
