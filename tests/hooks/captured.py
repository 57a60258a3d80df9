"""Jobs that run a backward of C++ nodes or of a subclass under compiled autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import s3cache
from tests.hooks.jobs import account
from tests.support.watch import lowerings

if TYPE_CHECKING:
    from collections.abc import Callable

#: An operator whose backward is a node in C++: the gradient is BY times the cube of the input.
NODE = """
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using namespace torch::autograd;

struct Scaled : public Function<Scaled> {
  static constexpr bool is_traceable = true;
  static Variable forward(AutogradContext* context, const Variable& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, variable_list given) {
    auto x = context->get_saved_variables()[0];
    return {given[0] * x * x * x * BY};
  }
};
at::Tensor scaled(const at::Tensor& x) { return Scaled::apply(x); }
TORCH_LIBRARY(captured, m) { m.def("scaled", scaled); }
"""


def through_a_node(url: str, library: str) -> dict[str, Any]:
    """Go backward through a C++ node of an extension."""
    torch.ops.load_library(library)
    scaled = torch.ops.captured.scaled

    def leaf() -> Any:
        return torch.linspace(-1, 1, 6).requires_grad_()

    return _captured(url, lambda x: scaled(x.sin()), leaf, lambda x: [x.grad])


def _captured(
    url: str,
    function: Callable[[Any], Any],
    leaf: Callable[[], Any],
    gradients: Callable[[Any], list[Any]],
) -> dict[str, Any]:
    """Whether gradients are those of eager, how much was lowered, and the counts."""
    lowered, expected, x = lowerings(), leaf(), leaf()
    function(expected).sum().backward()
    with s3cache.enabled(url) as cache:
        out = function(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile()):
            out.sum().backward()
        cache.flush()
        pairs = zip(gradients(x), gradients(expected), strict=True)
        return {
            "right": all(torch.allclose(one, other) for one, other in pairs),
            "lowered": len(lowered),
            "fx": {
                "hits": sum(cache.stats().fx.hits.values()),
                "saved": cache.stats().fx.saved,
            },
            **account(cache),
        }
