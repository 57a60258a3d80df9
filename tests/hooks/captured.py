"""A job that runs a backward of C++ nodes under compiled autograd."""

from __future__ import annotations

from typing import Any

import torch

import s3cache
from tests.hooks.jobs import account
from tests.support.watch import lowerings

#: An operator whose backward is a node in C++: the gradient is $BY times the cube of the input.
NODE = """
#include <cstdlib>
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
    return {given[0] * x * x * x * std::atoi(std::getenv("BY"))};
  }
};
at::Tensor scaled(const at::Tensor& x) { return Scaled::apply(x); }
TORCH_LIBRARY(captured, m) { m.def("scaled", scaled); }
"""


def through_a_node(url: str, library: str) -> dict[str, Any]:
    """Go backward through a C++ node of an extension: gradients as eager's, and the counts."""
    torch.ops.load_library(library)
    scaled = torch.ops.captured.scaled

    def function(x: Any) -> Any:
        return scaled(x.sin())

    lowered = lowerings()
    expected, x = (torch.linspace(-1, 1, 6).requires_grad_() for _ in range(2))
    function(expected).sum().backward()
    with s3cache.enabled(url) as cache:
        out = function(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile()):
            out.sum().backward()
        cache.flush()
        assert x.grad is not None
        assert expected.grad is not None
        level = cache.stats().fx
        return {
            "right": torch.allclose(x.grad, expected.grad),
            "lowered": len(lowered),
            "fx": {"hits": sum(level.hits.values()), "saved": level.saved},
            **account(cache),
        }
