"""Graphs with each kind of inputs, outputs and tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import conv2d
from torch.testing._internal.two_tensor import TwoTensor

from tests.equal.cases import case, graph, matrix, train
from tests.equal.programs import Compile

# -- inputs that a graph changes


def _any(**wanted: Any) -> Any:
    """Return a check that some input is described with all of these values."""

    def shows(runtime: dict[str, Any]) -> bool:
        return any(wanted.items() <= each.items() for each in runtime["inputs"])

    return shows


@graph("inputs", matrix, matrix, shows=_any(mutation_type="MUTATED_IN_GRAPH", mutates_data=True))
def data_mutated_in_graph(x: Any, y: Any) -> Any:
    x.mul_(2)
    return x + y


@case(
    "inputs",
    shows=_any(mutation_type="MUTATED_OUT_GRAPH", mutates_data=True, is_leaf=False),
    slow=True,
)
def data_mutated_out_of_graph(compile_it: Compile) -> Any:
    """Autograd sees a change of a non-leaf: the caller's tensor gets a new history."""

    leaf = matrix(True)
    x = leaf * 2
    out = compile_it(lambda x: x.mul_(3) + 1)(x)
    (out * 2 + x).sum().backward()
    return leaf, leaf.grad, x, out


@case("inputs", since=(2, 12), slow=True)
def storage_resized(compile_it: Compile) -> Any:
    """A parameter gets storage and values, as in FSDP."""

    def function(x: Any, full: Any) -> Any:
        x.untyped_storage().resize_(24)
        with torch.no_grad():
            x.copy_(full)
        return x * 2

    x, full = matrix(), matrix()
    x.untyped_storage().resize_(0)
    return x, full, compile_it(function)(x, full)


@graph(
    *("inputs", matrix, lambda: matrix() + 1), shows=_any(mutates_storage_metadata=True), slow=True
)
def storage_exchanged(x: Any, y: Any) -> Any:
    with torch.no_grad():
        torch.ops.aten.set_.source_Tensor(x, y)
    return x * 2


@case("inputs", shows=lambda runtime: "AOTSyntheticBaseWrapper" in runtime["wrappers"], slow=True)
def overlapping_and_mutated(compile_it: Compile) -> Any:
    """The graph writes to one of two views of a tensor; torch makes both from one base."""

    leaf = matrix(True)
    base = leaf * 1
    x, y = base.view(-1), base[1:]
    out = compile_it(lambda x, y: x.mul_(2) + y.view(-1)[:1])(x, y)
    out.sum().backward()
    return leaf, leaf.grad, base, x, y, out


_MUTATED = "indices_of_inputs_that_requires_grad_with_mutations_in_bw"


@case("inputs", shows=lambda runtime: bool(runtime[_MUTATED]), slow=True)
def mutated_in_the_backward_pass(compile_it: Compile) -> Any:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seen: Any) -> Any:
            ctx.seen = seen
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.no_grad():
                ctx.seen.add_(grad)
            return grad * 2, None

    function = compile_it(lambda x, seen: Counting.apply(x, seen))
    return train(function, matrix(True), matrix(True) * 0)


# -- outputs


def _has(kind: str) -> Any:
    return lambda runtime: any(each["output_type"] == kind for each in runtime["outputs"])


def _four_rows() -> Any:
    return matrix(rows=4)


def _trained() -> Any:
    return matrix(True, rows=4)


@graph("outputs", _four_rows, shows=_has("alias_of_input"), slow=True)
def alias_of_input(x: Any) -> Any:
    return x.view(-1), x.t()[1:], x + 1


_NO_VIEW = ("(1)[0].base", "(1)[0].is_view")


@graph("outputs", _trained, shows=_has("alias_of_intermediate_save_as_output"), slow=True)
def alias_of_intermediate_save_as_output(x: Any) -> Any:
    """The graph also returns the intermediate, and views are made from it."""
    y = x * x
    return y.view(-1), y.t()


@graph("outputs", _trained, shows=_has("alias_of_intermediate"), slow=True)
def alias_of_intermediate(x: Any) -> Any:
    y = x * x
    return y[0], y[1], y.t(), x + 1


@graph("outputs", _trained, shows=_has("alias_of_intermediate_base_is_user_output"), slow=True)
def alias_of_intermediate_base_is_user_output(x: Any) -> Any:
    y = x * x
    return y.view(-1), y


@graph("outputs", _trained, shows=_has("unsafe_view_alias"), differs=_NO_VIEW, slow=True)
def unsafe_view_alias(x: Any) -> Any:
    """The view counts as no view, because nothing else uses the intermediate."""
    return ((x * x).view(-1),)


@case("outputs", shows=_has("custom_function_view"), differs=_NO_VIEW, slow=True)
def custom_function_view(compile_it: Compile) -> Any:
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view(-1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.view(4, 3) * 3

    return train(compile_it(lambda x: (Flat.apply(x), x * 2)), matrix(True, rows=4))


@case(
    "outputs",
    shows=lambda runtime: any(each["dynamic_dims"] for each in runtime["outputs"]),
    native=True,
)
def dynamic_dims(compile_it: Compile) -> Any:
    function = compile_it(lambda x: (x * 2, x.t(), x.shape[0] * 2), dynamic=True)
    return [train(function, torch.ones(rows, 3, requires_grad=True)) for rows in (4, 7)]


@case("outputs", slow=True)
def strides_with_a_maximum(compile_it: Compile) -> Any:
    """torch evaluates them with numbers of SymPy."""
    function = compile_it(lambda x: conv2d(x, torch.ones(3, 3, 3, 3)) + 1, dynamic=True)
    return train(function, torch.ones(2, 3, 9, 9, requires_grad=True))


@graph(
    *("outputs", _trained),
    shows=lambda r: {e["requires_grad"] for e in r["outputs"]} == {True, False},
    slow=True,
)
def some_outputs_require_grad(x: Any) -> Any:
    with torch.no_grad():
        apart = x * 3
    return x * 2, x.detach() + 1, apart, x.argmax(), x.view(-1)


# -- kinds of tensors


def _subclass_in(place: str, depth: int = 1) -> Any:
    """Return a check that an input or output is a subclass with ``depth`` layers of subclasses."""

    def layers(meta: Any) -> int:
        inner = meta.get("attrs")
        return 0 if inner is None else 1 + max(map(layers, inner.values()))

    return lambda runtime: any(layers(each) >= depth for each in runtime["subclasses"][place])


def _two(requires_grad: bool = False, nested: bool = False) -> Any:
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


@graph("tensors", lambda: _two(requires_grad=True), shows=_subclass_in("tangents"))
def subclass_training(x: Any) -> Any:
    return x * x


@graph("tensors", lambda: _two(True, nested=True), shows=_subclass_in("tangents", 2), slow=True)
def nested_subclass_training(x: Any) -> Any:
    return x * x


@graph("tensors", matrix, graphs=0, bypassed=1, reasons=("function",), halves=1, slow=True)
def subclass_made_in_the_graph(x: Any) -> Any:
    """torch does not know the constructor of a subclass that is not its own."""
    return TwoTensor(x + 1, x * 2)


@case("tensors", shows=_subclass_in("outputs"), slow=True)
def subclass_with_dynamic_shape(compile_it: Compile) -> Any:
    function = compile_it(lambda x: (x * 2, x.t()), dynamic=True)
    results = []
    for rows in (4, 5):
        x = torch.ones(rows, 3)
        results.append(train(function, TwoTensor(x, x * 2).requires_grad_()))
    return results


@graph(
    "tensors",
    lambda: torch.arange(12.0).reshape(6, 2),
    lambda: torch.tensor([0, 1, 4, 6]),
    shows=_subclass_in("outputs"),
    differs=("(2).base", "(2).is_view"),
    slow=True,
)
def jagged_made_in_the_graph(values: Any, offsets: Any) -> Any:
    return torch.nested.nested_tensor_from_jagged(values * 2, offsets)


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
