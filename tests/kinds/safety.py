"""What may be cached is; what may not is bypassed, for the right reason. Both are right."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

from tests.kinds.case import Compile, case, matrix, train

# -- what graphs are made of


@case("safety")
def every_safe_node(compile_it: Compile) -> Any:
    """Methods, public functions, builtins, overloads, packets, constants, symbolic arithmetic."""
    import torch

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
    """Its kernel runs as it is; what its fake implementation and formula answer is in the key."""
    operator = _operator()
    x = matrix()
    return [train(compile_it(lambda x: operator(x) * 2), matrix(True)), x, compile_it(operator)(x)]


@functools.cache
def _operator() -> Any:
    import torch

    name, schema = "s3cache_tests::triple", "(Tensor x) -> Tensor"
    triple = torch.library.custom_op(name, lambda x: x * 3, mutates_args=(), schema=schema)
    triple.register_fake(lambda x: torch.empty_like(x))
    triple.register_autograd(lambda ctx, grad: grad * 3)
    return triple


@case("safety", graphs=0, bypassed=1, reasons=("subclass",), halves=1, slow=True)
def subclass_of_the_users(compile_it: Compile) -> Any:
    """What AOTAutograd traced of one can be shared, whatever its code asked of the process."""
    import torch

    return compile_it(lambda x: x.sin().inner * 19)(_clocked()(torch.arange(6.0)))


@functools.cache
def _clocked() -> Any:
    import torch

    class Clocked(torch.Tensor):
        inner: Any

        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> Any:
            return ["inner"], None

        @classmethod
        def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
            return cls(inner["inner"])

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            factor = 2 if time.time() > 0 else 3
            plain = [each.inner if isinstance(each, cls) else each for each in args]
            return cls(func(*plain, **(kwargs or {})) * factor)

        def _stable_hash_for_caching(self) -> str:
            return "clocked"

    Clocked.__qualname__ = "Clocked"  # torch writes its name into keys
    globals()["Clocked"] = Clocked
    return Clocked


@case("safety", graphs=1, bypassed=1, reasons=("function",), halves=2, slow=True)
def graphs_of_a_mixture(compile_it: Compile) -> Any:
    """A program in three parts: one that can be cached, one that cannot, and one that breaks."""
    import torch

    torch._dynamo.allow_in_graph(unknown)

    def function(x: Any) -> Any:
        y = (x.sin() * 62).sum(0)
        torch._dynamo.graph_break()
        y = unknown(y).exp()
        if y.sum() > 1e9:  # depends on data: here Dynamo goes on in Python
            return y
        return y + x

    return train(compile_it(function), matrix(True))


def unknown(x: Any) -> Any:
    return x * 13


@case("safety", graphs=0, bypassed=2, reasons=("override",), halves=2, slow=True)
def a_function_of_torch_that_was_replaced(compile_it: Compile) -> Any:
    """Below a function that torch calls, so that it is traced: by two, one asks the clock."""
    import torch

    original = torch.layer_norm
    x = matrix()
    function = compile_it(lambda x: torch.nn.functional.layer_norm(x, (3,)))
    try:
        torch.layer_norm = lambda *args: original(*args) * 2
        doubled = function(x)
        torch.layer_norm = lambda *args: original(*args) * (time.time() > 0)
        timed = compile_it(lambda x: torch.nn.functional.layer_norm(x + 1, (3,)))(x)
    finally:
        torch.layer_norm = original
    return x, doubled, timed


@case("safety", graphs=0, bypassed=1, reasons=("generator",), lowered=1, slow=True)
def a_lowering_of_the_users(compile_it: Compile) -> Any:
    """It generates code, and nothing says which code it is."""
    from unittest.mock import patch

    import torch
    from torch._inductor.lowering import lowerings

    sine = torch.ops.aten.sin.default
    original = lowerings[sine]
    x = matrix()
    with patch.dict(lowerings, {sine: lambda x: original(x)}):
        return x, compile_it(lambda x: x.sin() * 28)(x)


@case("safety", graphs=0, bypassed=1, reasons=("module",), halves=1, slow=True)
def unknown_module(compile_it: Compile) -> Any:
    """A module that is called as a whole: nothing says what its code is."""
    import torch

    class Opaque(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 15

    graph = torch.fx.Graph()
    graph.output((graph.call_module("opaque", (graph.placeholder("x"),)),))
    x = matrix()
    network = torch.fx.GraphModule({"opaque": Opaque()}, graph)
    return x, compile_it(network, without_dynamo=True)(x)


@case("safety", graphs=3, slow=True)
def custom_autograd_function(compile_it: Compile) -> Any:
    """Both of its passes are in the graph; torch's switch for it makes no other key."""
    import torch

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
        """With an attribute, an output without derivative, and another function inside."""

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
        found.append(train(compile_it(lambda x: Scale.apply(x) + 0), matrix(True)))
    found.append(train(compile_it(lambda x: Split.apply(x, 0.17)), matrix(True)))
    return found


@case("safety", graphs=0, bypassed=1, reasons=("higher-order-op",), lowered=3, slow=True)
def higher_order_operator_that_cannot_be_cached(compile_it: Compile) -> Any:
    import torch

    def function(x: Any) -> Any:
        return torch.cond(x.sum() > 3, lambda x: x + 17, lambda x: x - 17, (x,))

    x = matrix()
    return x, compile_it(function)(x), function(-x)


@case("safety", slow=True)
def invoke_subgraph(compile_it: Compile) -> Any:
    import torch

    @torch.compiler.nested_compile_region
    def region(x: Any) -> Any:
        return x.sin() * 0.18

    return train(compile_it(lambda x: region(region(x))), matrix(True))


@case(
    "safety",
    graphs=2,
    bypassed=2,
    reasons=("checkpoint-context",),
    halves=4,
    since=(2, 13),
    slow=True,
)
def selective_checkpoint(compile_it: Compile) -> Any:
    """With a ``cache_hash`` on its ``context_fn``, with operators, and with code of the user's."""
    import time

    import torch
    from torch.utils import checkpoint as library

    def program(context_fn: Any) -> Any:
        torch.compiler.reset()

        def function(x: Any, w: Any) -> Any:
            return library.checkpoint(
                lambda x: (x @ w).cos(), x, use_reentrant=False, context_fn=context_fn
            )

        return train(compile_it(function), matrix(True), torch.ones(3, 3, requires_grad=True))

    def asks_the_clock(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return time.time() < 0

    create = library.create_selective_checkpoint_contexts
    hashed = functools.partial(create, _policy)
    hashed.cache_hash = "mm is saved"  # type: ignore[attr-defined]
    policies = [torch.ops.aten.mm.default], _policy, asks_the_clock
    return [program(hashed), *(program(functools.partial(create, each)) for each in policies)]


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    saved = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@case("safety", graphs=3, slow=True)
def forward_mode_transforms(compile_it: Compile) -> Any:
    """What Dynamo puts around them are functions of torch's that its own check has no list of."""
    import torch

    def function(x: Any) -> Any:
        return (x.sin() * x).sum()

    def directional(x: Any) -> Any:  # copies, as whether results are views is up to torch
        return [each.clone() for each in torch.func.jvp(function, (x,), (x.cos(),))]

    x = torch.linspace(-1, 1, 4)
    return [
        compile_it(directional)(x),
        compile_it(lambda x: torch.func.hessian(function)(x).clone())(x),
        compile_it(lambda x: torch.func.jacfwd(torch.sin)(x) * 3)(x),
    ]


# -- where graphs are compiled


@case("safety", graphs=1, bypassed=1, reasons=("function",), halves=2, slow=True)
def saved_tensor_hooks_in_the_graph(compile_it: Compile) -> Any:
    """Hooks that are graphs are compiled in. What they wrap must say what it is."""
    import torch

    def traced(name: str, cache_hash: str | None) -> Any:
        graph = torch.fx.Graph()
        node = graph.call_function(scaled, (graph.placeholder("x"), 0.5 if name == "pack" else 2.0))
        node.meta["is_wrapped"] = True
        if cache_hash:
            node.meta["user_cache_hash"] = cache_hash
        graph.output(node)
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    found = []
    for cache_hash in ("scaled-1", None):
        hooks = traced("pack", cache_hash), traced("unpack", cache_hash)
        torch.compiler.reset()
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            found.append(train(compile_it(lambda x: x.cos() * 20), matrix(True)))
    return found


def scaled(x: Any, factor: float) -> Any:
    return x * factor


@case("safety", slow=True)
def view_replay(compile_it: Compile) -> Any:
    """The views of an output are in the entry, and are replayed from there."""
    import torch

    def function(x: Any) -> Any:
        return x.view(-1), x * 25

    with torch._functorch.config.patch(view_replay_for_aliased_outputs=True):
        return train(compile_it(function), matrix(True))


@case("safety", graphs=1, bypassed=1, reasons=("custom-pass",), lowered=1, slow=True)
def custom_pass(compile_it: Compile) -> Any:
    """One that says which code it is, and one that does not."""
    import torch
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Known(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            pass

        def uuid(self) -> str:
            return "nothing-1"

    x = matrix()
    found = []
    for custom in (Known(), lambda graph: None):
        torch.compiler.reset()
        with torch._inductor.config.patch(post_grad_custom_post_pass=custom):
            found.append(compile_it(lambda x: x * 26)(x))
    return x, found
