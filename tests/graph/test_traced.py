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
        gm = graph_of()
        with FakeTensorMode():
            x = torch.empty(100)[offset : offset + 8]
            placeholder, call, _ = gm.graph.nodes
            placeholder.meta["val"], call.meta["val"] = x, x[step : step + 2]
        return traced_values(gm).digest

    assert of(0, 2) == of(5, 2) != of(5, 3)


def test_symbolic_sizes_are_in_the_key_as_expressions() -> None:
    def of(change: Callable[[Any], Any]) -> str:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.empty(5, 7))
        gm = graph_of()
        with mode:
            list(gm.graph.nodes)[1].meta["val"] = change(x)
        return traced_values(gm).digest

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
    plain = digest()
    assert (
        digest(stack_trace=str(time.time()), seq_nr=7, nn_module_stack={"a": ("b", int)}) == plain
    )
    assert digest(noted=object()) == plain


def test_a_subclass_is_described_by_its_inner_tensors() -> None:
    def of(inner: Callable[[], Tensor]) -> str:
        gm = graph_of()
        with FakeTensorMode():
            list(gm.graph.nodes)[1].meta["val"] = TwoTensor(inner(), inner())
        return traced_values(gm).digest

    assert of(lambda: torch.empty(4, 6)) == of(lambda: torch.empty(4, 6))
    assert of(lambda: torch.empty(4, 6)) != of(lambda: torch.empty(6, 4).t())


def test_values_in_nested_graphs_matter() -> None:
    digests = set()
    for make in VALUES[:3]:
        outer = graph_of()
        outer.add_module("body", graph_of(make))
        digests.add(traced_values(outer).digest)
    assert len(digests) == 3
