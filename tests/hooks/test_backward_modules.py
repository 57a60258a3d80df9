"""Backwards that compiled autograd asks a hit for: every operator in them is there again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module
from torch.fx import Graph, GraphModule

from s3cache.hooks._conditions import deserialize_backward
from s3cache.hooks._state import Patches
from s3cache.torch_api import internals

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    patches = Patches()
    patches.wrap(internals.deserialize_backward, deserialize_backward)
    yield
    patches.undo()


def _again(graph: Graph) -> GraphModule:
    return serialize_graph_module(GraphModule(torch.nn.Module(), graph)).deserialize()


def test_a_size_in_the_middle_of_a_list() -> None:
    graph = Graph()
    x, size = graph.placeholder("x"), graph.placeholder("size")
    graph.output(graph.call_function(aten.expand.default, (x, [2, size])))
    assert _again(graph)(torch.ones(1, 3), 3).shape == (2, 3)


def test_random_numbers_are_drawn_in_every_call() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(aten.rand.default, ([4],))
    graph.output(graph.call_function(aten.mul.Tensor, (x, drawn)))
    module = _again(graph)
    one, other = module(torch.ones(4)), module(torch.ones(4))
    assert not torch.equal(one, other)
    assert aten.rand.default in {node.target for node in module.graph.nodes}


def test_it_can_be_asked_for_more_than_once() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.sin.default, (x,)), x))
    kept = serialize_graph_module(GraphModule(torch.nn.Module(), graph))
    one, other = kept.deserialize(), kept.deserialize()
    assert one.code == other.code
    assert torch.equal(one(torch.ones(2))[0], torch.ones(2).sin())


def test_what_is_no_operator_is_traced_as_ever() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    larger = graph.call_function(torch.sym_max, (x, 3))
    graph.output(graph.call_function(aten.full.default, ([larger], 1.0)))
    assert _again(graph)(5).shape == (5,)
