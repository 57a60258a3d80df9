"""Safe graphs are cached, and others are bypassed for the right reason. Results are right."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from tests.equal.cases import case, graph, matrix, train
from tests.equal.programs import Compile

# -- contents of graphs


@case("safety")
def every_safe_node(compile_it: Compile) -> Any:
    """Methods, public functions, builtins, overloads, packets, constants, symbolic arithmetic."""
    table = torch.tensor([1.0, 2.0, 3.0])

    def function(x: Any) -> Any:
        y = x.sin() + torch.cos(x) + torch.nn.functional.relu(x)
        y = torch.ops.aten.mul.Tensor(y, x) + torch.ops.aten.sigmoid(x)
        y = y + torch.tensor([0.5, 1.5, 2.5]) + table
        return y, max(x.shape[0], 3), math.sqrt(x.shape[0])

    x = matrix()
    return x, compile_it(function, dynamic=True)(x)


@case("safety", graphs=0, bypassed=2, reasons=("custom-operator",), halves=3, slow=True)
def custom_operator(compile_it: Compile) -> Any:
    """Its kernel is not compiled; results of its fake implementation and formula are in the key."""
    operator = _operator()
    x = matrix()
    return [train(compile_it(lambda x: operator(x) * 2), matrix(True)), x, compile_it(operator)(x)]


@functools.cache
def _operator() -> Any:
    name, schema = "s3cache_tests::triple", "(Tensor x) -> Tensor"
    triple = torch.library.custom_op(name, lambda x: x * 3, mutates_args=(), schema=schema)
    triple.register_fake(lambda x: torch.empty_like(x))
    triple.register_autograd(lambda ctx, grad: grad * 3)
    return triple


@case("safety", graphs=3, slow=True)
def custom_autograd_function(compile_it: Compile) -> Any:
    """Both of its passes are in the graph; torch's option for it does not change the key."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad * x * 16

    class Split(torch.autograd.Function):
        """A function with an attribute, an output without derivative, and an inner function."""

        @staticmethod
        def forward(ctx: Any, x: Any, by: float) -> Any:
            ctx.by = by
            index = x.argmax(-1)
            ctx.mark_non_differentiable(index)
            return x * by, index

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            return Scale.apply(grad) * ctx.by, None

    found = [train(compile_it(lambda x: Scale.apply(x)), matrix(True))]
    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
        found.append(train(compile_it(lambda x: Scale.apply(x) * 3), matrix(True)))
    found.append(train(compile_it(lambda x: Split.apply(x, 0.17)), matrix(True)))
    return found


@case("safety", graphs=0, bypassed=1, reasons=("higher-order-op",), lowered=3, slow=True)
def higher_order_operator_that_cannot_be_cached(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return torch.cond(x.sum() > 3, lambda x: x + 17, lambda x: x - 17, (x,))

    x = matrix()
    return x, compile_it(function)(x), function(-x)


@torch.compiler.nested_compile_region
def _region(x: Any) -> Any:
    return x.sin() * 0.18


@graph("safety", lambda: matrix(True), slow=True)
def invoke_subgraph(x: Any) -> Any:
    return _region(_region(x))


@case("safety", graphs=3, native=True, slow=True)
def forward_mode_transforms(compile_it: Compile) -> Any:
    """Dynamo wraps them in functions of torch that torch's own check does not list."""

    def function(x: Any) -> Any:
        return (x.sin() * x).sum()

    def directional(x: Any) -> Any:  # copies, because torch decides whether results are views
        return [each.clone() for each in torch.func.jvp(function, (x,), (x.cos(),))]

    x = torch.linspace(-1, 1, 4)
    return [
        compile_it(directional)(x),
        compile_it(lambda x: torch.func.hessian(function)(x).clone())(x),
        compile_it(lambda x: torch.func.jacfwd(torch.sin)(x) * 3)(x),
    ]


# -- contexts of compilation


@case("safety", graphs=1, bypassed=1, reasons=("function",), halves=2, slow=True)
def saved_tensor_hooks_in_the_graph(compile_it: Compile) -> Any:
    """Hooks that are graphs become part of the graph. Their wrapped functions need a cache hash."""

    def traced(name: str, cache_hash: str | None) -> Any:
        graph = torch.fx.Graph()
        node = graph.call_function(scaled, (graph.placeholder("x"), 0.5 if name == "pack" else 2.0))
        node.meta["is_wrapped"] = True
        if cache_hash:
            node.meta["user_cache_hash"] = cache_hash
        graph.output(node)
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    found = []
    for cache_hash, by in (("scaled-1", 20), (None, 21)):
        hooks = traced("pack", cache_hash), traced("unpack", cache_hash)
        torch.compiler.reset()
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            found.append(train(compile_it(lambda x, by=by: x.cos() * by), matrix(True)))
    return found


def scaled(x: Any, factor: float) -> Any:
    return x * factor


@case("safety", slow=True)
def view_replay(compile_it: Compile) -> Any:
    """The entry contains the views of an output, and torch replays them."""
    with torch._functorch.config.patch(view_replay_for_aliased_outputs=True):
        return train(compile_it(lambda x: (x.view(-1), x * 25)), matrix(True))


# -- modes of torch.compile


@case("paths", graphs=3, shared=2, slow=True)
def inference(compile_it: Compile) -> Any:
    """Inputs that need no gradients, ``no_grad``, and ``inference_mode``."""
    function = compile_it(lambda x: x.sin() + 1)
    found = [function(matrix())]
    with torch.no_grad():
        found.append(function(matrix(True)))
    with torch.inference_mode():
        out = function(matrix())
        found.append([out.is_inference(), out.clone()])
    return found


def _variants(entries: list[dict[str, Any]]) -> bool:
    """Return whether several entries have one key and different guards."""
    keys, guards = {e["key"] for e in entries}, {e["guards"] for e in entries}
    return len(keys) == 1 and len(guards) == len(entries) > 1


@case("paths", graphs=2, together=_variants)
def guard_variants_of_one_key(compile_it: Compile) -> Any:
    """Two equal graphs with code for different sizes: the branch is in AOTAutograd."""
    function = compile_it(lambda x: x[:, :3] @ x[:3, :], dynamic=True)
    found = []
    for columns in (3, 8, 3, 9):
        x = torch.ones(11, columns)  # equal sizes would be one symbol
        found.append((x, function(x)))
    return found


@case("paths", differs=("(1).stride",), slow=True)
def data_dependent_size(compile_it: Compile) -> Any:
    """A size that depends on the values (an unbacked symbol)."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, function = matrix(), lambda x: torch.nonzero(x > 2) * 2
        return x, compile_it(function)(x), function(x + 1)
