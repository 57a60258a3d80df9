"""A program that compiles a Triton kernel and imports neither torch nor s3cache."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from tests.features.ports.kernels import add

_make = CUDABackend.make_cubin
_made: list[object] = []


def _counted(*args: object, **kwargs: object) -> object:
    _made.append(args)
    return _make(*args, **kwargs)


CUDABackend.make_cubin = _counted
types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
triton.compile(ASTSource(add, types, {(4,): 128}), target=GPUTarget("cuda", 90, 32))
assert "torch" not in sys.modules
print(len(_made))
