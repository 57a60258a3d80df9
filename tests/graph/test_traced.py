"""The metadata of every value in a traced graph is in the key of the second level."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from s3cache.graph._graph import traced_values


def graph_of(make: Callable[[Tensor], Any] = lambda x: x, **meta: Any) -> GraphModule:
    """Return a graph of one call; ``make`` computes the value of the call from its input."""
    graph = Graph()
    with FakeTensorMode():
        x = torch.empty(4, 6)
        placeholder = graph.placeholder("x")
        placeholder.meta["val"] = x
        call = graph.call_function(torch.ops.aten.sin.default, (placeholder,))
        call.meta.update(val=make(x), **meta)
    graph.output(call)
    return GraphModule({}, graph)


def digest(make: Callable[[Tensor], Any] = lambda x: x, **meta: Any) -> str:
    return traced_values(graph_of(make, **meta)).digest


def digest_with(value: Callable[[Any], Any], of: Any = None) -> str:
    """Return the digest of a graph if ``value`` computes the value of its call, from ``of``."""
    gm = graph_of()
    placeholder, call, _ = gm.graph.nodes
    placeholder.meta["val"] = placeholder.meta["val"] if of is None else of
    with placeholder.meta["val"].fake_mode:
        call.meta["val"] = value(placeholder.meta["val"])
    return traced_values(gm).digest


VALUES: list[Callable[[Tensor], Any]] = [
    lambda x: torch.empty(4, 6),
    lambda x: torch.empty(6, 4),
    lambda x: torch.empty(6, 4).t(),
    lambda x: torch.empty(4, 12)[:, ::2],
    lambda x: torch.empty(4, 6, dtype=torch.float64),
    lambda x: torch.empty(4, 6, device="meta"),
    lambda x: torch.empty(4, 6).requires_grad_(),
    lambda x: torch.empty(4, 6, dtype=torch.complex64),
    lambda x: torch.empty(4, 6, dtype=torch.complex64).conj(),
    lambda x: torch._neg_view(torch.empty(4, 6)),
    lambda x: x,
    lambda x: x.view(4, 6),
    lambda x: x[1:],
    lambda x: torch.empty(5, 6)[1:][:3],
    lambda x: (x, torch.empty(4, 6)),
    lambda x: (torch.empty(4, 6), torch.empty(4, 6)),
    lambda x: [torch.empty(4, 6)] * 2,
    lambda x: None,
    lambda x: 3,
    lambda x: True,
]


def test_each_property_of_a_value_matters() -> None:
    digests = [digest(make) for make in VALUES]
    assert digests[10] == digests[11]  # a view of the whole tensor has the same digest
    assert len(set(digests)) == len(VALUES) - 1
    assert digests == [digest(make) for make in VALUES]


def test_the_offset_of_an_input_does_not_matter_but_the_offset_of_a_view_does() -> None:
    def of(offset: int, step: int) -> str:
        with FakeTensorMode():
            x = torch.empty(100)[offset : offset + 8]
        return digest_with(lambda x: x[step : step + 2], x)

    assert of(0, 2) == of(5, 2) != of(5, 3)


def test_symbolic_sizes_are_in_the_key_as_expressions() -> None:
    def of(change: Callable[[Any], Any]) -> str:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        return digest_with(change, mode.from_tensor(torch.empty(5, 7)))

    changes: list[Callable[[Any], Any]] = [
        lambda x: x,
        lambda x: x.new_empty(x.shape[0] * 2, x.shape[1]),
        lambda x: x.new_empty(x.shape[0] + 1, x.shape[1]),
        lambda x: x.shape[0],
    ]
    assert len({of(change) for change in changes}) == len(changes)
    assert [of(change) for change in changes] == [of(change) for change in changes]


@pytest.mark.parametrize(
    ("mark", "other"), [(True, False), (1, 2), ("a", "b"), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3})]
)
def test_marks_that_passes_put_on_nodes_matter(mark: Any, other: Any) -> None:
    assert digest(mark=mark) == digest(mark=mark) != digest(mark=other)
    assert digest(mark=mark) not in (digest(), digest(elsewhere=mark))


def test_the_origin_of_a_node_does_not_matter() -> None:
    origin: dict[str, Any] = {
        "stack_trace": str(time.time()),
        "seq_nr": 7,
        "nn_module_stack": {"a": ("b", int)},
    }
    assert digest() == digest(**origin) == digest(noted=object())


def test_inner_tensors_of_a_subclass_and_nested_graphs_matter() -> None:
    def wrapped(make: Callable[[Tensor], Any]) -> str:
        return digest_with(lambda x: TwoTensor(make(x), make(x)))

    def nested(make: Callable[[Tensor], Any]) -> str:
        outer = graph_of()
        outer.add_module("body", graph_of(make))
        return traced_values(outer).digest

    for of in (wrapped, nested):
        assert of(VALUES[0]) == of(VALUES[0])
        assert len({of(VALUES[0]), of(VALUES[2])}) == 2
