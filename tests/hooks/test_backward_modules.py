"""The backward that compiled autograd gets from a hit has all of its operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module
from torch.fx import Graph, GraphModule

from s3cache.hooks._again import deserialize_backward
from s3cache.hooks._state import Patches
from s3cache.torch_api import internals

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    patches = Patches()
    patches.wrap(internals.deserialize_backward, deserialize_backward)
    yield
    patches.close()


def _round_trip(graph: Graph) -> GraphModule:
    return serialize_graph_module(GraphModule(torch.nn.Module(), graph)).deserialize()


def test_a_size_in_a_list_is_kept() -> None:
    graph = Graph()
    x, size = graph.placeholder("x"), graph.placeholder("size")
    graph.output(graph.call_function(aten.expand.default, (x, [2, size])))
    assert _round_trip(graph)(torch.ones(1, 3), 3).shape == (2, 3)


def test_random_numbers_are_drawn_in_every_call() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(aten.rand.default, ([4],))
    graph.output(graph.call_function(aten.mul.Tensor, (x, drawn)))
    kept = serialize_graph_module(GraphModule(torch.nn.Module(), graph))
    module, again = kept.deserialize(), kept.deserialize()  # asked for more than once
    assert module.code == again.code
    assert not torch.equal(module(torch.ones(4)), module(torch.ones(4)))
