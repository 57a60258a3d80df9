"""Two plain graphs have the same text exactly if torch generates the same code for them."""

from __future__ import annotations

import builtins
import enum
import math
import operator
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from s3cache.graph._graph import graph_as_text

_FUNCTIONS: list[Any] = [
    *(torch.add, torch.sub, torch.nn.functional.gelu, torch._C._nn.linear, torch.Tensor.add_),
    *(torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar, torch.ops.aten.add),
    *(operator.add, operator.iadd, operator.getitem, builtins.getattr),
]
_CONSTANTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, math.inf, 2j, "", "x", "x, y", "1", "None", ...]),
    st.sampled_from([torch.float32, torch.int64, torch.strided, torch.channels_last]),
    st.sampled_from([torch.device("cpu"), torch.device("meta", 0)]),
)
_HELD = st.recursive(
    _CONSTANTS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.builds(slice, inner, inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=4,
)
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["call_function", "call_method", "get_attr"]),
        st.sampled_from(_FUNCTIONS),
        st.sampled_from(["add", "sub"]),
        st.tuples(_HELD, _HELD),
        st.dictionaries(st.sampled_from(["alpha", "out"]), _HELD, max_size=1),
        st.sampled_from([None, torch.Tensor, torch.SymInt]),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


def graph_of(calls: Any) -> Graph:
    graph = Graph()
    last: Any = graph.placeholder("x")
    other = graph.placeholder("y")
    for kind, function, name, args, kwargs, annotation, on_other in calls:
        first = other if on_other else last
        if function in (operator.add, operator.iadd, operator.getitem):
            args, kwargs = args[:1], {}  # torch writes only two operands
        if kind == "call_function":
            last = graph.call_function(function, (first, *args), kwargs)
        elif kind == "call_method":
            last = graph.call_method(name, (first, *args), kwargs)
        else:
            last = graph.get_attr(name)
        last.type = annotation
    graph.output((last, other))
    return graph


def code_of(graph: Graph) -> tuple[str, list[str]]:
    code = graph.python_code("self")
    return code.src, sorted(code.globals)


@given(_CALLS, st.data())
def test_texts_differ_exactly_if_the_generated_code_differs(calls: Any, data: Any) -> None:
    """The graphs differ in one argument, name, operator or type: random pairs seldom do."""
    (more,) = data.draw(st.lists(st.sampled_from(data.draw(_CALLS)), min_size=1, max_size=1))
    place = data.draw(st.integers(0, len(calls) - 1))
    which = data.draw(st.integers(0, len(more) - 1))
    changed = [*calls]
    changed[place] = (*calls[place][:which], more[which], *calls[place][which + 1 :])
    one, other = graph_of(calls), graph_of(changed)
    assert (graph_as_text(one) == graph_as_text(other)) == (code_of(one) == code_of(other))


class _Colour(enum.Enum):
    RED = 1


class _Named(NamedTuple):
    value: int


def _function_of_ours(x: Any) -> Any:
    return x


def test_graphs_that_are_not_plain_have_no_text() -> None:
    """Arguments that are more than their ``repr``, imported functions, and user code."""

    class Text(str):
        __slots__ = ()

    def called(function: Any = torch.add, argument: Any = 1, **meta: Any) -> Graph:
        graph = Graph()
        node = graph.call_function(function, (graph.placeholder("x"), 1))
        node.update_arg(1, argument)
        node.meta.update(meta)
        graph.output(node)
        return graph

    assert graph_as_text(called()) is not None
    for each in (_Colour.RED, _Named(1), Text("x"), object(), torch.add, [_Colour.RED], Text):
        assert graph_as_text(called(argument=each)) is None, each
    for function in (_function_of_ours, math.sqrt):
        assert graph_as_text(called(function)) is None
    assert graph_as_text(called(is_wrapped=True)) is None
    transformed, annotated = called(), called()
    transformed.on_generate_code(lambda _: lambda body: [*body, "x = 1"])
    next(iter(annotated.nodes)).type = list[int]
    assert graph_as_text(transformed) is None
    assert graph_as_text(annotated) is None
