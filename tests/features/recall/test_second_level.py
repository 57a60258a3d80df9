"""Frames with graphs that have no key of their own are recalled, and torch compiles Dynamo's graph.

Each frame calls code that takes part in tracing. It is compiled on one machine, and recalled by a
second one. On others, something about that code has changed: results are those of torch alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import s3cache
from s3cache.features.recall.sources import RefusedError
from s3cache.features.recall.traced_graph import Compilation, TracedGraph
from tests.support.machines import Machine, remote_url

#: What is another one on the machines after the second, with a frame that uses it.
CHANGES = {
    "kernel": "operator",
    "fake": "size from a fake",
    "formula": "training",
    "schema": "operator",
    "subclass": "wrapper subclass",
    "function": "function",
}
#: What Dynamo sees: another size of a result, or another schema.
TRACED = ("fake", "schema", "function")
#: By the name of what can change: the value that the code uses, which is in no content.
USED: dict[str, int] = {}


class Pair(Tensor):
    """A wrapper of two tensors, like those of quantized weights."""

    @staticmethod
    def __new__(cls, some: Tensor, others: Tensor, by: float) -> Pair:
        """Make a wrapper of the size of ``some``."""
        made: Pair = Tensor._make_wrapper_subclass(cls, some.shape, dtype=some.dtype)
        return made

    def __init__(self, some: Tensor, others: Tensor, by: float) -> None:
        self.some, self.others, self.by = some, others, by

    def __tensor_flatten__(self) -> tuple[list[str], list[float]]:
        return ["some", "others"], [self.by]

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["some"], inner["others"], *meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on plain tensors."""
        plain = [
            x.some * x.by + x.others * USED["subclass"] if isinstance(x, Pair) else x for x in args
        ]
        return func(*plain, **(kwargs or {}))


@torch.compiler.allow_in_graph
def allowed(x: Tensor) -> Tensor:
    return torch.cat([x * USED["function"]] * USED["function"])


def define(change: str) -> None:
    """Define the operators, one part of them with a change."""
    USED.update({name: 3 if name == change else 2 for name in CHANGES})
    used = dict(USED)
    operator: Any = functools.partial(torch.library.custom_op, mutates_args=())
    default = float(used["schema"])

    def kernel(x: Tensor, by: float = default) -> Tensor:
        return x * used["kernel"] * by

    def repeated(x: Tensor) -> Tensor:
        return torch.cat([x * 2] * used["fake"])

    def trained(x: Tensor) -> Tensor:
        return x * 2

    scale = operator("second_level::scale", kernel)
    scale.register_fake(lambda x, by=default: torch.empty_like(x))
    repeat = operator("second_level::repeat", repeated)
    repeat.register_fake(lambda x: x.new_empty(x.shape[0] * used["fake"], *x.shape[1:]))
    train = operator("second_level::trained", trained)
    train.register_fake(lambda x: torch.empty_like(x))
    train.register_autograd(lambda ctx, grad: grad * used["formula"])

    known = operator("second_level::known", trained)
    known.register_fake(lambda x: torch.empty_like(x))
    s3cache.register_cacheable(torch.ops.second_level.known, version="1")


OPS: Any = torch.ops.second_level


class Layers(torch.nn.Module):
    """Layers with an operator in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of all layers."""
        for layer in self.layers:
            x = OPS.trained(layer(x)).relu() + x
        return x


def _broken(x: Tensor) -> Tensor:
    y = OPS.trained(x.sin())
    torch._dynamo.graph_break()
    return OPS.scale(y.cos()) + y


def _branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda v: OPS.scale(v.sin()), lambda v: v.cos(), (x,))


def _with_pair(x: Tensor, pair: Any) -> Tensor:
    return (x @ pair).relu() + 1


def _kept(x: Tensor) -> Any:
    return checkpoint(lambda v: OPS.trained(v.sin()).cos(), x, use_reentrant=False) * 2


FRAMES: dict[str, Any] = {
    "operator": lambda x: OPS.scale(x.sin()).cos(),
    "size from a fake": lambda x: OPS.repeat(x.sin()) * OPS.repeat(x).shape[0],
    "branches": _branches,
    "graph break": _broken,
    "function": lambda x: allowed(x.sin()) + allowed(x).shape[0],
    "registered operator": lambda x: OPS.known(x.sin()),
}


def _inferred(frame: Any) -> list[Any]:
    with torch.no_grad():
        compiled, x = torch.compile(frame), torch.linspace(0, 2, 16).reshape(4, 4)
        return [compiled(each) for each in (x, -x)]  # the second call builds torch's guards


def _wrapped() -> list[Any]:
    x = torch.linspace(-2, 2, 16).reshape(4, 4)
    with torch.no_grad():
        compiled = torch.compile(_with_pair)
        return [compiled(x, Pair(x * number, x + 1, 0.5)) for number in (1, 2)]


def _regions() -> list[Any]:
    compiled, results = torch.compile(_kept), []
    for by in (1, 2):
        x = torch.linspace(-by, by, 16).requires_grad_()
        compiled(x).square().sum().backward()
        results.append(x.grad)
    return results


def _once_without_backward() -> Tensor:
    """Compile a graph that is never an entry as a whole: it waits for its backward."""
    x = torch.ones(4, requires_grad=True)
    return torch.compile(lambda x: x.sin() * 3)(x).detach()


def _trained() -> list[Any]:
    torch.manual_seed(0)
    layers = Layers()
    compiled, losses = torch.compile(layers), []
    for _ in range(3):
        loss = compiled(torch.ones(4, 4)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for each in layers.parameters():
                each.copy_(each - 0.1 * (each.grad if each.grad is not None else 0))
                each.grad = None
    return [losses, *layers.parameters()]


WAITING = "no backward"
JOBS: dict[str, Any] = {
    **{name: functools.partial(_inferred, frame) for name, frame in FRAMES.items()},
    "wrapper subclass": _wrapped,
    WAITING: lambda: [_once_without_backward()],
    "training": _trained,
    "regions": _regions,
}


def compile_all(url: str, names: list[str], change: str = "", alone: bool = True) -> dict[str, Any]:
    """Compile frames with recall, and ``alone``; return what recall counted, and the results."""
    define(change)
    found: dict[str, Any] = {}
    for name in names:
        torch.compiler.reset()
        with s3cache.enabled(url, recall="on") as cache:
            result = _bits(JOBS[name]())
            assert not cache.flush(60).remaining
            counts = {k: int(n) for k, n in cache.stats().features["recall"].items()}
        torch.compiler.reset()
        found[name] = counts, result, _bits(JOBS[name]()) if alone else result
    return found


def _bits(results: list[Any]) -> list[Any]:
    return [each.tolist() if isinstance(each, Tensor) else each for each in results]


def _run(root: Path, number: int, *args: Any) -> dict[str, Any]:
    machine = Machine(root / f"machine-{number}")
    job = f"{__name__}:compile_all", remote_url(root)
    found: dict[str, Any] = machine.run(*job, *args, server=number % 2).result
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("second-level")
    (root / "remote").mkdir()
    return root


@pytest.fixture(scope="module")
def first(root: Path) -> dict[str, Any]:
    return _run(root, 1, [*JOBS])


@pytest.fixture(scope="module")
def second(root: Path, first: dict[str, Any]) -> dict[str, Any]:
    assert first
    return _run(root, 2, [*JOBS], "", False)


@pytest.mark.parametrize("name", [name for name in JOBS if name != WAITING])
def test_the_frame_is_recalled_on_another_machine(
    name: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    (counts, result, alone), (later, other, _) = first[name], second[name]
    assert counts["saved"] >= 1, counts
    assert later["recalled"] == counts["saved"], later
    assert later["traced"] == 0, later
    assert result == other == alone


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, root: Path, first: dict[str, Any]) -> None:
    """Results are as without a cache, whether the frame is traced again or not."""
    name = CHANGES[change]
    ((counts, result, alone),) = _run(root, 3 + [*CHANGES].index(change), [name], change).values()
    assert result == alone != first[name][2]
    assert bool(counts["traced"]) == (change in TRACED), counts
    assert counts["disagreed"] == 0


def test_a_graph_without_an_entry_is_kept_once_a_lookup_has_missed(
    root: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    ((third, result, _),) = _run(root, 3 + len(CHANGES), [WAITING], "", False).values()
    assert second[WAITING][0]["traced"] == first[WAITING][0]["saved"] == 1
    assert (third["recalled"], third["traced"]) == (1, 0)
    assert result == first[WAITING][2]


# -- graphs that are not saved


def _calling(target: Any, *args: Any) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"), *args)))
    return torch.fx.GraphModule({}, graph)


def _with_constant() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("constant"))
    return torch.fx.GraphModule({"constant": torch.ones(1)}, graph)


@pytest.mark.parametrize(
    "make",
    [
        _with_constant,
        lambda: _calling(torch.ops.higher_order.while_loop),
        lambda: _calling(torch.add, 1 << 64),
        lambda: _calling(torch.add, torch.max(torch.ones(2), dim=0)),
        lambda: _calling(torch.add, {1: 2}),
    ],
)
def test_a_graph_that_another_process_cannot_rebuild_is_not_saved(make: Any) -> None:
    with pytest.raises(RefusedError):
        TracedGraph.of(make())


def _places(objects: list[Any]) -> Any:
    return lambda value: objects.index(value), lambda place: objects[place]


def test_a_function_of_torch_that_was_replaced_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place_of, at = _places([])
    inputs = [torch.ones(2)]
    saved = TracedGraph.of(_calling(torch.sin)).saved(inputs, place_of, at)
    assert Compilation(saved, inputs, at).is_as_traced()
    monkeypatch.setattr(torch, "sin", functools.wraps(torch.sin)(lambda x: torch.cos(x)))
    with pytest.raises(LookupError):
        Compilation(saved, inputs, at)
    monkeypatch.setattr(torch, "sin", torch.cos)
    with pytest.raises(LookupError):
        Compilation(saved, inputs, at)
