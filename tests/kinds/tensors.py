"""Kinds of tensors that a graph may take and return."""

from __future__ import annotations

from typing import Any

import torch

from tests.kinds.case import Compile, case, train


def _subclass_in(place: str, depth: int = 1) -> Any:
    """Return a check that an input or output is a subclass with ``depth`` layers of subclasses."""

    def layers(meta: Any) -> int:
        inner = meta.get("attrs")
        return 0 if inner is None else 1 + max(map(layers, inner.values()))

    return lambda runtime: any(layers(each) >= depth for each in runtime["subclasses"][place])


def _two(requires_grad: bool = False, nested: bool = False) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 10
    inner = TwoTensor(a, b)
    found = TwoTensor(inner, TwoTensor(a + 1, b + 1)) if nested else inner
    return found.requires_grad_(requires_grad)


@case("tensors", graphs=4, slow=True)
def plain(compile_it: Compile) -> Any:
    """Several dtypes, no dimensions, no elements, gaps between elements."""
    function = compile_it(lambda x: (x + x, x.shape))
    inputs = [
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.arange(12, dtype=torch.int64).reshape(3, 4)[:, ::2],
        torch.ones(2, 3, dtype=torch.float64).t(),
    ]
    torch._dynamo.mark_static(inputs[2])
    return [(x, function(x)) for x in inputs]


@case("tensors", shows=lambda runtime: any(e["mutates_data"] for e in runtime["inputs"]), slow=True)
def buffers(compile_it: Compile) -> Any:
    """Training writes to running statistics."""
    network = torch.nn.BatchNorm1d(3)
    found = train(compile_it(network), torch.arange(12.0).reshape(4, 3).requires_grad_())
    return found, list(network.buffers()), [each.grad for each in network.parameters()]


@case("tensors", shows=_subclass_in("tangents"))
def subclass_training(compile_it: Compile) -> Any:
    return train(compile_it(lambda x: x * x), _two(requires_grad=True))


@case("tensors", shows=_subclass_in("tangents", depth=2), slow=True)
def nested_subclass_training(compile_it: Compile) -> Any:
    return train(compile_it(lambda x: x * x), _two(requires_grad=True, nested=True))


@case("tensors", graphs=0, bypassed=1, reasons=("function",), halves=1, slow=True)
def subclass_made_in_the_graph(compile_it: Compile) -> Any:
    """torch does not know the constructor of a subclass that is not its own."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.ones(2, 3)
    return x, compile_it(lambda x: TwoTensor(x + 1, x * 2))(x)


@case("tensors", shows=_subclass_in("outputs"), slow=True)
def subclass_with_dynamic_shape(compile_it: Compile) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    function = compile_it(lambda x: (x * 2, x.t()), dynamic=True)
    results = []
    for rows in (4, 5):
        x = torch.ones(rows, 3)
        results.append(train(function, TwoTensor(x, x * 2).requires_grad_()))
    return results


@case("tensors", shows=_subclass_in("outputs"), differs=("[2].base", "[2].is_view"), slow=True)
def jagged_made_in_the_graph(compile_it: Compile) -> Any:
    def function(values: Any, offsets: Any) -> Any:
        return torch.nested.nested_tensor_from_jagged(values * 2, offsets)

    values, offsets = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 4, 6])
    return values, offsets, compile_it(function)(values, offsets)


@case("tensors", graphs=4, shows=_subclass_in("tangents"), slow=True)
def jagged_training(compile_it: Compile) -> Any:
    """Two graphs, for batches of two and of any number; the third batch fits the latter."""
    function = compile_it(lambda x: (x * 2).sin())
    found = []
    for lengths in ((2, 4), (5, 1, 2), (1, 3)):
        parts = [torch.arange(3.0 * each).reshape(each, 3) for each in lengths]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        function(x).values().sum().backward()
        assert x.grad is not None
        found.append([x.grad.values(), compile_it(lambda x: (x * 2).sum())(x)])
    return found
