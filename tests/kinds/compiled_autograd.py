"""Cached graphs under compiled autograd, which traces the backward pass as a whole."""

from __future__ import annotations

from typing import Any

from tests.kinds.case import Compile, case


def _leaf() -> Any:
    import torch

    return torch.arange(6.0).reshape(2, 3).requires_grad_()


def _backward(compile_it: Compile, loss: Any, compiled: bool = True) -> None:
    """Go backward under compiled autograd; for eager as ever."""
    import torch

    def keep(function: Any) -> Any:
        return function

    if compile_it(keep) is keep:
        loss.backward()
        return
    compiler = (lambda gm: torch.compile(gm, fullgraph=True)) if compiled else (lambda gm: gm)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()


@case("compiled_autograd", graphs=1)
def backward_is_traced(compile_it: Compile) -> Any:
    """The cached forward's backward pass is traced, and run as it is."""
    x = _leaf()
    out = compile_it(lambda x: x * x + 5)(x)
    _backward(compile_it, out.sum(), compiled=False)
    return x, out, x.grad


@case("compiled_autograd", graphs=2)
def its_graph_is_cached(compile_it: Compile) -> Any:
    """The graph of the whole backward pass is a graph like others."""
    x = _leaf()
    out = compile_it(lambda x: x * x * 6)(x)
    _backward(compile_it, out.exp().sum() * 0.5)
    return x, out, x.grad


@case("compiled_autograd", graphs=1)
def eager_forward(compile_it: Compile) -> Any:
    x = _leaf()
    out = x * x * 7
    _backward(compile_it, out.sum())
    return x, out, x.grad


@case("compiled_autograd", graphs=2)
def parameters_of_a_module(compile_it: Compile) -> Any:
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    out = compile_it(network)(torch.ones(4, 3))
    _backward(compile_it, out.square().sum())
    return out, [(each, each.grad) for each in network.parameters()]


@case("compiled_autograd", graphs=1)
def hooks_keep_order_and_effect(compile_it: Compile) -> Any:
    """Tensor, pre-, post- and accumulate-grad hooks around a cached graph."""
    return _hooks(compile_it, compiled=False)


@case("compiled_autograd", graphs=0, bypassed=0)
def hooks_without_compiled_autograd(compile_it: Compile) -> Any:
    """placeholder"""
    return 0


def _hooks(compile_it: Compile, *, compiled: bool) -> Any:
    order: list[str] = []

    def scale(name: str, factor: float) -> Any:
        def hook(grad: Any) -> Any:
            order.append(name)
            return grad * factor

        return hook

    def pre(grads: Any) -> Any:
        order.append("pre")
        return tuple(each * 2 for each in grads)

    def post(grads_in: Any, grads_out: Any) -> None:
        order.append("post")

    def accumulated(leaf: Any) -> None:
        order.append("accumulated")
        leaf.grad.add_(1)

    x = _leaf()
    x.register_hook(scale("leaf", 3))
    x.register_post_accumulate_grad_hook(accumulated)
    out = compile_it(lambda x: x * x - 8)(x)
    out.register_hook(scale("output", 5))
    out.grad_fn.register_prehook(pre)
    out.grad_fn.register_hook(post)
    _backward(compile_it, out.sum(), compiled=compiled)
    return x, out, x.grad, order
