"""Ways through torch.compile."""

from __future__ import annotations

from typing import Any

from tests.kinds.case import Compile, case, matrix, train


@case("paths", graphs=3)
def inference(compile_it: Compile) -> Any:
    """Without anything to train, under ``no_grad`` and in ``inference_mode``."""
    import torch

    function = compile_it(lambda x: x.sin() + 1)
    found = [function(matrix())]
    with torch.no_grad():
        found.append(function(matrix(True)))
    with torch.inference_mode():
        out = function(matrix())
        found.append([out.is_inference(), out.clone()])
    return found


@case("paths", graphs=2, slow=True)
def lazy_backward(compile_it: Compile) -> Any:
    """Two forward passes, then their backward passes in the opposite order."""
    first, second = compile_it(lambda x: x.exp()), compile_it(lambda x: (x * 2).exp())
    x, y = matrix(True), matrix(True)
    a, b = first(x), second(y)
    b.sum().backward()
    a.sum().backward()
    return x, y, a, b, x.grad, y.grad


@case("paths", graphs=1, slow=True)
def eager_backward(compile_it: Compile) -> Any:
    """The backward pass is compiled along with the forward pass, and never runs."""
    import torch

    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        x = matrix(True)
        return x, compile_it(lambda x: x.cosh())(x)


@case("paths", graphs=0, unsaved=1, halves=1, slow=True)
def forward_without_a_backward(compile_it: Compile) -> Any:
    """As in an evaluation that forgets ``no_grad``: the backward pass never runs."""
    x = matrix(True)
    return x, compile_it(lambda x: x.sinh())(x)


@case("paths", graphs=1, slow=True)
def backward_twice(compile_it: Compile) -> Any:
    x = matrix(True)
    out = compile_it(lambda x: x * x * x)(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    return x, x.grad, out


@case("paths", graphs=2, slow=True)
def dynamic_after_a_recompile(compile_it: Compile) -> Any:
    """A second size makes the size a symbol; a third needs nothing new."""
    function = compile_it(lambda x: x * 2 + x.shape[0])
    return [train(function, matrix(True, rows)) for rows in (2, 3, 4)]


def _variants(entries: list[dict[str, Any]]) -> bool:
    """Several entries under one key, each with guards of its own."""
    keys, guards = {e["key"] for e in entries}, {e["guards"] for e in entries}
    return len(keys) == 1 and len(guards) == len(entries) > 1


@case("paths", graphs=2, together=_variants)
def guard_variants_of_one_key(compile_it: Compile) -> Any:
    """Two graphs that are the same, and hold for different sizes."""
    import torch

    function = compile_it(lambda x: (x * 2, 1 if x.shape[0] > 5 else 0), dynamic=True)
    found = []
    for rows in (4, 8, 3, 9):
        x = torch.ones(rows, 11)  # equal sizes would be one symbol
        found.append((x, function(x)))
    return found


@case("paths", graphs=3, slow=True)
def graph_breaks(compile_it: Compile) -> Any:
    import torch

    def function(x: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        z = y.exp()
        torch._dynamo.graph_break()
        return z - y

    return train(compile_it(function), matrix(True))


@case("paths", differs=("[1].stride",), slow=True)
def data_dependent_size(compile_it: Compile) -> Any:
    """A size that only the numbers tell (an unbacked symbol)."""
    import torch

    def function(x: Any) -> Any:
        return torch.nonzero(x > 2) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = matrix()
        return x, compile_it(function)(x), function(x + 1)


@case("paths", graphs=1, slow=True)
def cpp_wrapper(compile_it: Compile) -> Any:
    import torch

    with torch._inductor.config.patch(cpp_wrapper=True):
        return train(compile_it(lambda x: x * x + 4), matrix(True))


@case("paths", graphs=1, slow=True)
def no_kernel_at_all(compile_it: Compile) -> Any:
    """Only a library call: nothing native to carry."""
    import torch

    x, w = torch.ones(2, 3), torch.ones(3, 2)
    return compile_it(lambda x, w: x @ w)(x, w)
