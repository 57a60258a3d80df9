"""Jobs that compile with Triton. Each job returns how often each step ran."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

import s3cache
from tests.features.ports import standin

_FLOAT = torch.float32
_LAUNCHER = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&module); }
"""


def _steps(**more: Any) -> dict[str, Any]:
    return {**{name: n for name, n in standin.counts.items() if n}, **more}


def kernel(arch: int = 90) -> dict[str, Any]:
    standin.install(arch)
    from tests.features.ports.kernels import add

    compiled = add.warmup(_FLOAT, _FLOAT, _FLOAT, 1024, BLOCK=128, grid=(1,))
    return _steps(hash=compiled.hash)


def measured(name: str = standin.H100) -> dict[str, Any]:
    """Choose between two configurations, save the choice on the disk, and compile the winner."""
    standin.install(name=name)
    from triton.runtime.jit import MockTensor

    from tests.features.ports.kernels import tuned

    tensor = MockTensor(_FLOAT)
    tuned.run(tensor, tensor, tensor, 1024, grid=(1,), warmup=True)
    return _steps(block=tuned.best_config.kwargs["BLOCK"])


def library() -> dict[str, Any]:
    """Compile and import a C library, as Triton does with launchers of kernels."""
    standin.install()
    from triton.runtime.build import compile_module_from_src

    # Any, because the function has no types.
    build: Any = compile_module_from_src
    return _steps(module=build(_LAUNCHER, "tiny").__name__)


def liger() -> dict[str, Any]:
    """Compile two kernels of Liger."""
    standin.install()
    from liger_kernel.ops.swiglu import _swiglu_backward_kernel, _swiglu_forward_kernel

    half = torch.float16
    for each in (_swiglu_forward_kernel, _swiglu_backward_kernel):
        each.warmup(half, half, half, 64, 1.0, n_cols=64, BLOCK_SIZE=64, grid=(1,))
    return _steps()


def fla() -> dict[str, Any]:
    """Let flash-linear-attention choose one of its configurations and compile it."""
    standin.install()
    from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel
    from triton.runtime.jit import MockTensor

    tensor = MockTensor(_FLOAT)
    shape = {"T": 64, "B": 1, "H": 1, "BT": 64, "REVERSE": False}
    chunk_local_cumsum_scalar_kernel.run(
        tensor, tensor, None, None, None, **shape, grid=(1,), warmup=True
    )
    return _steps()


def everything() -> dict[str, Any]:
    """Run these three jobs in one process."""
    standin.install()
    return {**kernel(), **measured(), **library()}


def without_kernels() -> list[str]:
    """Import torch and Triton; return the modules of s3cache's cache that this imports."""
    return [name for name in sys.modules if name.startswith("s3cache.cache")]


def killed() -> None:
    """Compile a kernel, then kill this process before the upload."""
    kernel()
    os.kill(os.getpid(), signal.SIGKILL)


def claimed(name: str, ended: str) -> dict[str, Any]:
    """Compile a kernel: ``one`` starts, and continues or fails once ``two`` has asked for it."""
    standin.install()
    cache = s3cache.active()
    assert cache is not None
    missed: Any = cache.engine.events.missed
    ask = missed.ask

    def claimed(*args: Any) -> Any:
        if name == "two":
            (where / "asking").touch()
        return ask(*args)

    missed.ask = claimed
    where = Path(os.environ["S3CACHE_LOCAL_DIR"])
    ptxas = CUDABackend.make_cubin

    def make_cubin(*args: Any, **kwargs: Any) -> Any:
        if name == "one":
            (where / "compiling").touch()
            _wait_for(where / "asking")
            time.sleep(1)
            if ended == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if ended == "failed":
                raise RuntimeError("out of registers")
        return ptxas(*args, **kwargs)

    CUDABackend.make_cubin = make_cubin
    if name == "two":
        _wait_for(where / "compiling")
    with contextlib.suppress(RuntimeError):
        _compile()
    if name == "two":
        (where / "done").touch()
    if ended == "failed":
        _wait_for(where / "done")  # the claim ends before this process
    return _steps()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def nothing() -> None:
    """Do no lookups."""


def unnamed() -> dict[str, int]:
    """Compile a kernel under several conditions; return the number of saved entries for each."""
    standin.install()
    from triton import knobs

    cache = s3cache.active()
    assert cache is not None
    conditions = {
        "plain": "TRITON_NOTHING_KNOWN",
        "override": "TRITON_KERNEL_OVERRIDE",
        "globals": "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS",
        "plugin": "TRITON_PLUGIN_PATHS",
        "variable": "TRITON_MOCK_PTX_VERSION",
    }
    saved: dict[str, int] = {}
    for name, variable in conditions.items():
        before = _saved(cache)
        shutil.rmtree(knobs.cache.dir, ignore_errors=True)
        if name != "plain":
            os.environ[variable] = "8.3" if name == "variable" else "1"
        _compile()
        os.environ.pop(variable, None)
        saved[name] = _saved(cache) - before
    before = _saved(cache)
    shutil.rmtree(knobs.cache.dir, ignore_errors=True)
    inductors: dict[str, Any] = {"__name__": "torch._inductor.runtime.triton_heuristics"}
    exec("def call(function): return function()", inductors)
    source = _source()
    inductors["call"](functools.partial(triton.compile, source))
    return {**saved, "inductor": _saved(cache) - before}


def _saved(cache: Any) -> int:
    counts = cache.stats().kinds.get("triton")
    return 0 if counts is None else counts.saved


def _compile() -> Any:
    return triton.compile(_source())


def _source() -> Any:
    from triton.compiler import ASTSource

    from tests.features.ports.kernels import add

    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return ASTSource(add, types, {(4,): 128})


def planted(*names: str) -> list[tuple[bool, bool]]:
    """Look up a kernel with an entry that has a file of each name; return if there is a file."""
    standin.install()
    from triton.runtime.cache import get_cache_manager

    source = os.path.join(os.environ["HOME"], "source")
    with open(source, "wb") as file:
        file.write(b"{}")
    found = []
    for number, name in enumerate(names):
        key = f"{number:02}" * 32
        manager = get_cache_manager(key)
        manager.put_group("kernel.json", {"kernel.json": source, name: source})
        shutil.rmtree(manager.cache_dir)
        other = get_cache_manager(key)
        is_outside = os.path.exists(os.path.join(other.cache_dir, name))
        found.append((other.get_group("kernel.json") is not None, is_outside))
    return found
