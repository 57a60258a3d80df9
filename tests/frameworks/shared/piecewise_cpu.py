"""A platform for vLLM: a processor that compiles as vLLM does for GPUs.

vLLM cuts the model at its attention, and compiles each piece by itself. For processors it compiles
the model as a whole. The metadata beside this file makes vLLM find the platform, which is used if
the variable ``PIECEWISE_CPU`` is set.
"""

import os
import re
from importlib.util import find_spec


def find():
    return f"{__name__}.PiecewiseCpu" if os.environ.get("PIECEWISE_CPU") else None


_libraries = []  # torch removes the operators of a library that is not used any more


def _define_missing_operators():
    """Define the operators that vLLM's passes look for in a graph, and only its CUDA build has."""
    import torch

    (package,) = find_spec("vllm").submodule_search_locations
    passes = os.path.join(package, "compilation", "passes", "utility", "fix_functionalization.py")
    with open(passes, encoding="utf-8") as file:
        names = set(re.findall(r"torch\.ops\._C\.(\w+)", file.read()))
    for name in sorted(names):
        if not hasattr(torch.ops._C, name):
            library = torch.library.Library("_C", "FRAGMENT")
            library.define(f"{name}() -> ()")
            _libraries.append(library)


def __getattr__(name):
    if name != "PiecewiseCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    class PiecewiseCpu(CpuPlatform):
        @classmethod
        def import_kernels(cls):
            super().import_kernels()
            _define_missing_operators()

        @classmethod
        def check_and_update_config(cls, vllm_config):
            from vllm.config import CompilationMode

            compilation = vllm_config.compilation_config
            was = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
            super().check_and_update_config(vllm_config)
            if was[0] == CompilationMode.VLLM_COMPILE:
                compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = was
                compilation.compile_sizes = []

    globals()[name] = PiecewiseCpu
    return PiecewiseCpu
