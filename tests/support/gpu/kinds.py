"""The kinds of graphs that are compiled for a GPU, and reports on them."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable
from typing import Any

from tests.support.gpu import standin


def run(*names: str) -> dict[str, Any]:
    """Run kinds in one process with fake tensors; return a report on each by name.

    A report has the counts, digests of the ``code`` that was generated or came with the entry and
    of the ``launched`` kernels, and the ``devices`` of those.
    """
    standin.install()
    import s3cache

    cache = s3cache.enable()
    reports = {name: _report(cache, KINDS[name]) for name in names}
    cache.flush(60)
    return reports


def devices() -> dict[str, Any]:
    """Return what torch reports about the GPUs."""
    standin.install()
    import torch

    with standin.tensors():
        return {
            "count": torch.cuda.device_count(),
            "current": torch.cuda.current_device(),
            "name": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "multiprocessors": torch.cuda.get_device_properties().multi_processor_count,
            "tensor": str(torch.ones(2, device="cuda").device),
        }


def _report(cache: Any, kind: Callable[[], None]) -> dict[str, Any]:
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import PyCodeCache

    torch._dynamo.reset()
    counters.clear()
    standin.counts.clear()
    standin.launched.clear()
    before = cache.stats()
    modules = len(PyCodeCache.modules)
    with standin.tensors(), torch.device("cuda"):
        kind()
    after = cache.stats()
    index = 0 if kind is cpp_wrapper else torch.cuda.current_device()
    return {
        **standin.counts,
        "hits": _hits(after) - _hits(before),
        "fx hits": _hits(after.fx) - _hits(before.fx),
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "code": [_code(module, index) for module in PyCodeCache.modules[modules:]],
        "launched": [f"{each.name} {each.code}" for each in standin.launched],
        "devices": sorted({each.device for each in standin.launched}),
    }


def _hits(stats: Any) -> int:
    return sum(stats.hits.values())


def _code(module: Any, index: int) -> str:
    """Return a digest of a module's code, without comments and the index of its device."""
    import linecache

    source = "".join(linecache.getlines(module.__file__))
    places = r"index=|cuda:|_DeviceGuard\(|set_device\(|get_raw_stream\(|raw_stream"
    source = re.sub(rf"({places}){index}\b", r"\1N", source)
    return hashlib.sha256(ast.dump(ast.parse(source)).encode()).hexdigest()[:16]


def inference() -> None:
    import torch

    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)
    with torch.no_grad():
        torch.compile(torch.nn.Sequential(*layers))(torch.randn(16, 64))


def training() -> None:
    import torch

    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)
    compiled = torch.compile(torch.nn.Sequential(*layers))
    for _ in range(2):
        compiled(torch.randn(16, 64)).pow(2).mean().backward()


def split_graphs() -> None:
    """Several graphs, split as under DDP: each answers its first call with fake tensors."""
    import torch
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._inductor.compile_fx import compile_fx

    sizes = (64, 96), (96, 128), (128, 64)
    layers = [torch.nn.Linear(*size) for size in sizes]
    split = DDPOptimizer(1 << 14, compile_fx, first_bucket_cap=1 << 14)  # type: ignore[arg-type]
    compiled = torch.compile(torch.nn.Sequential(*layers), backend=split.compile_fn)
    for _ in range(2):
        compiled(torch.randn(16, 64)).pow(2).mean().backward()


def dynamic_shapes() -> None:
    import torch

    def function(x: Any) -> Any:
        return torch.nn.functional.silu(x).sum(0) * x.shape[0]

    compiled = torch.compile(function, dynamic=True)
    for rows in 16, 24:
        compiled(torch.randn(rows, 64))


def triton_kernel() -> None:
    import torch

    from tests.support.gpu import kernels

    torch.compile(kernels.add)(torch.randn(1000), torch.randn(1000))


def triton_op() -> None:
    import torch

    from tests.support.gpu import kernels

    torch.compile(lambda x: kernels.double(x).relu())(torch.randn(1000))


def triton_autotune() -> None:
    import torch

    from tests.support.gpu import kernels

    torch.compile(kernels.add_tuned)(torch.randn(1000), torch.randn(1000))


def flex_attention() -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cuda")
    q, k, v = (torch.randn(1, 2, 128, 32) for _ in range(3))
    torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))(q, k, v)


def reductions() -> None:
    import torch

    torch.compile(lambda x: x.softmax(-1))(torch.randn(512, 8192))


def combo_kernels() -> None:
    import torch

    def function(a: Any, b: Any, c: Any) -> Any:
        return a.relu(), b.sigmoid(), c.tanh()

    options: dict[str, Any] = {"combo_kernels": True, "benchmark_combo_kernel": False}
    torch.compile(function, options=options)(*(torch.randn(n, 64) for n in (16, 24, 32)))


def combo_blocks() -> None:
    """Torch searches the blocks of each part of a combo kernel, one part after the other."""
    import torch

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
    import torch

    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    torch.compile(lambda x: x.softmax(-1), options=options)(torch.randn(512, 4096))


def known_kernel() -> None:
    """The second graph has a kernel that the process has measured before."""
    import torch

    x = torch.randn(256, 6144)
    torch.compile(lambda x: x.softmax(-1))(x)
    torch.compile(lambda x: x.softmax(-1) @ x.t())(x)


def foreach() -> None:
    import torch

    def step(parameters: Any, gradients: Any) -> Any:
        return torch._foreach_add(parameters, gradients, alpha=-0.1)

    sizes = 64, 128, 256
    torch.compile(step)([torch.randn(n) for n in sizes], [torch.randn(n) for n in sizes])


def cpp_wrapper() -> None:
    """C++ compiles its kernels at their first launch; one has several configurations."""
    import torch

    def function(x: Any) -> Any:
        return (x.softmax(-1) @ x).relu()

    with torch.cuda.device(0), torch.device("cuda:0"):
        torch.compile(function, options={"cpp_wrapper": True})(torch.randn(2048, 2048))


def reduce_overhead() -> None:
    import pytest
    import torch

    compiled = torch.compile(lambda x: x.cos() + 1, mode="reduce-overhead")
    # The graph is compiled by then; the error is from capturing it.
    with pytest.raises(RuntimeError, match="Stream requires CUDA"):
        compiled(torch.randn(512))


KINDS = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        *(
            inference,
            training,
            split_graphs,
            dynamic_shapes,
            triton_kernel,
            triton_op,
            triton_autotune,
        ),
        *(flex_attention, reductions, combo_kernels, combo_blocks, coordinate_descent),
        *(known_kernel, foreach, cpp_wrapper, reduce_overhead),
    )
}
