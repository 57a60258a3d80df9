"""A stand-in for a GPU: Triton compiles for it and launches nothing; calls are counted."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import triton.runtime.build
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

H100 = "NVIDIA H100 80GB HBM3"

#: How often each step ran in this process.
counts: collections.Counter[str] = collections.Counter()


def _counted(name: str, owner: Any, attribute: str) -> None:
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    setattr(owner, attribute, counted)


class _Driver:
    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = types.SimpleNamespace(get_device_properties=lambda _: properties)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def bench(call: Any, quantiles: Any = None, **_: Any) -> list[float]:
            """Return a time without a measurement: the first call is the fastest."""
            counts["measured"] += 1
            return [float(counts["measured"])] * 3

        return bench


def install(arch: int = 90, name: str = H100) -> None:
    """Make Triton and ``torch.cuda`` see one GPU of this name and architecture."""
    props = types.SimpleNamespace(
        name=name, major=arch // 10, minor=arch % 10, multi_processor_count=132, total_memory=80
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda _=None: props
    cuda.get_device_capability = lambda _=None: (arch // 10, arch % 10)
    cuda.get_device_name = lambda _=None: name
    driver.set_active(_Driver(arch))
    if counts:
        return
    counts["installed"] = 1
    _counted("ptxas", CUDABackend, "make_cubin")
    _counted("cc", triton.runtime.build, "_build")
