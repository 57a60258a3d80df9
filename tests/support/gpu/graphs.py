"""The kinds of graphs that are compiled for a GPU: each function compiles and runs one or several.

A process imports this module, and Triton, after it has got its GPUs
(:mod:`tests.support.gpu.kinds`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._inductor.compile_fx import compile_fx
from torch.nn.attention import flex_attention as flex


def inference() -> None:
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)
    with torch.no_grad():
        torch.compile(torch.nn.Sequential(*layers))(torch.randn(16, 64))


def training() -> None:
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)
    compiled = torch.compile(torch.nn.Sequential(*layers))
    for _ in range(2):
        compiled(torch.randn(16, 64)).pow(2).mean().backward()


def split_graphs() -> None:
    """Several graphs, split as under DDP: each answers its first call with fake tensors."""
    sizes = (64, 96), (96, 128), (128, 64)
    layers = [torch.nn.Linear(*size) for size in sizes]
    split = DDPOptimizer(1 << 14, compile_fx, first_bucket_cap=1 << 14)  # type: ignore[arg-type]
    compiled = torch.compile(torch.nn.Sequential(*layers), backend=split.compile_fn)
    for _ in range(2):
        compiled(torch.randn(16, 64)).pow(2).mean().backward()


def dynamic_shapes() -> None:
    def function(x: Any) -> Any:
        return torch.nn.functional.silu(x).sum(0) * x.shape[0]

    compiled = torch.compile(function, dynamic=True)
    for rows in 16, 24:
        compiled(torch.randn(rows, 64))


# -- kernels as users write them


@triton.jit
def add_kernel(a, b, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = i < n
    tl.store(out + i, tl.load(a + i, mask=held) + tl.load(b + i, mask=held), mask=held)


def add(a: Any, b: Any) -> Any:
    out = torch.empty_like(a)
    add_kernel[(triton.cdiv(a.numel(), 256),)](a, b, out, a.numel(), BLOCK=256)
    return out.relu()


tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((128, 2), (512, 4))],
    key=["n"],
)(add_kernel)


def add_tuned(a: Any, b: Any) -> Any:
    out = torch.empty_like(a)
    n = a.numel()
    tuned_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](a, b, out, n)
    return out.relu()


@torch.library.triton_op("s3cache_tests::double", mutates_args={})
def double(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    kernel = torch.library.wrap_triton(add_kernel)
    kernel[(triton.cdiv(x.numel(), 128),)](x, x, out, x.numel(), BLOCK=128)
    return out


def triton_kernel() -> None:
    torch.compile(add)(torch.randn(1000), torch.randn(1000))


def triton_op() -> None:
    torch.compile(lambda x: double(x).relu())(torch.randn(1000))


def triton_autotune() -> None:
    torch.compile(add_tuned)(torch.randn(1000), torch.randn(1000))


# -- other kinds


def flex_attention() -> None:
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cuda")
    q, k, v = (torch.randn(1, 2, 128, 32) for _ in range(3))
    torch.compile(lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask))(q, k, v)


def reductions() -> None:
    torch.compile(lambda x: x.softmax(-1))(torch.randn(512, 8192))


def combo_kernels() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        return a.relu(), b.sigmoid(), c.tanh()

    options: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": False}
    torch.compile(function, options=options)(*(torch.randn(n, 64) for n in (16, 24, 32)))


def combo_blocks() -> None:
    """Torch searches the blocks of each part of a combo kernel, one part after the other."""

    def function(a: Any, b: Any, c: Any) -> Any:
        return a.relu(), b.sigmoid(), c.softmax(-1)

    options: dict[str, Any] = {
        "combo_kernels": True,
        "combo_kernel_per_subkernel_blocks": True,
        "benchmark_combo_kernel": False,
    }
    torch.compile(function, options=options)(*(torch.randn(n, 64) for n in (160, 240, 320)))


def coordinate_descent() -> None:
    """A search continues from the fastest configuration, and finds one that was not compiled."""
    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    torch.compile(lambda x: x.softmax(-1), options=options)(torch.randn(512, 4096))


def known_kernel() -> None:
    """The second graph has a kernel that the process has measured before."""
    x = torch.randn(256, 6144)
    torch.compile(lambda x: x.softmax(-1))(x)
    torch.compile(lambda x: x.softmax(-1) @ x.t())(x)


def foreach() -> None:
    def step(parameters: Any, gradients: Any) -> Any:
        return torch._foreach_add(parameters, gradients, alpha=-0.1)

    sizes = 64, 128, 256
    torch.compile(step)([torch.randn(n) for n in sizes], [torch.randn(n) for n in sizes])


def cpp_wrapper() -> None:
    """C++ compiles its kernels at their first launch; one has several configurations."""

    def function(x: Any) -> Any:
        return (x.softmax(-1) @ x).relu()

    with torch.cuda.device(0), torch.device("cuda:0"):
        torch.compile(function, options={"cpp_wrapper": True})(torch.randn(2048, 2048))


def reduce_overhead() -> None:
    compiled = torch.compile(lambda x: x.cos() + 1, mode="reduce-overhead")
    # The graph is compiled by then; the error is from capturing it.
    with pytest.raises(RuntimeError, match="Stream requires CUDA"):
        compiled(torch.randn(512))
