"""Stand-in GPUs for torch's CPU build: code is compiled for them, and never run.

``install`` makes ``import torch`` find what only a CUDA build has: a handful of functions in
``torch._C`` and the properties of a device. All layers above are torch's and Triton's own.
Tensors are fake (``torch._subclasses.FakeTensorMode``), so they have a device and no data. Inductor
generates code for them, Triton compiles it, and ``ptxas`` assembles it. A launch of a kernel does
nothing.

Triton is not in the environment of the tests, where torch would find it. ``machine`` gives it to
the processes that need it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import struct
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.support.machines import ROOT, Machine

#: The directory where ``make`` installs Triton, for processes with a stand-in only.
TRITON = Path(os.environ.get("S3CACHE_TEST_TRITON") or ROOT / ".venv-triton/site")

WITH_CUDA = "this torch is built with CUDA; infra/gpu/standin.sh has a stand-in for its driver"


def _missing() -> str:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    if (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return WITH_CUDA
    return "" if (TRITON / "triton").exists() else f"no Triton in {TRITON}; make test installs it"


#: Why there can be no stand-in, as the reason to skip a test; otherwise empty.
MISSING = _missing()

#: The number of devices of each kind; ``standin.cpp`` has the same number.
COUNT = 8

#: How often Triton compiled and assembled in this process, and torch measured and launched, by
#: ``triton.compile``, ``ptxas`` (AMD's assembler too), ``benchmark`` and ``launch``.
counts: Counter[str] = Counter()


@dataclasses.dataclass(frozen=True)
class Properties:
    """The result of ``torch.cuda.get_device_properties``, with torch's names."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 48 << 10
    regs_per_multiprocessor: int = 64 << 10
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    clock_rate: int = 1_980_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120
    gcnArchName: str = ""  # noqa: N815 - torch's name
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    uuid: str = "00000000-0000-0000-0000-000000000000"


#: Devices by kind, as their vendors describe them.
GPUS = {
    "A100": Properties("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 << 30, 40 << 20, 166912, 167936),
    "H100": Properties("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 << 30, 50 << 20, 232448, 233472),
    "B200": Properties("NVIDIA B200", 10, 0, 148, 180 << 30, 126 << 20, 232448, 233472),
    "MI300X": Properties(
        *("AMD Instinct MI300X", 9, 4, 304, 192 << 30, 4 << 20, 65536, 65536, 65536, 131072),
        warp_size=64,
        gcnArchName="gfx942:sramecc+:xnack-",
    ),
}


def machine(root: Path, gpu: str = "H100", *, index: int = 0, **environment: str) -> Machine:
    """Return a machine with eight GPUs of a kind; its jobs call ``install`` before importing torch.

    Args:
        gpu: a key of ``GPUS``.
        index: the index of the current device.
        environment: ``GPU_NAME=value`` changes one of the properties, in capital letters.
    """
    return Machine(root, **{**environment_of(gpu, index), **environment})


def environment_of(gpu: str = "H100", index: int = 0) -> dict[str, str]:
    """Return the variables that describe the GPUs of a process; see :func:`machine`."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRITON)]),
        "GPU": gpu,
        "GPU_INDEX": str(index),
        "GPU_LIBRARY": str(_library()),
    }


def properties() -> Properties:
    """Return the properties of the GPU that the environment names."""
    gpu = GPUS[os.environ.get("GPU", "H100")]
    changed = {
        field.name: type(getattr(gpu, field.name))(os.environ[variable])
        for field in dataclasses.fields(Properties)
        if (variable := f"GPU_{field.name.upper()}") in os.environ
    }
    return dataclasses.replace(gpu, **changed)


def install() -> None:
    """Give this process eight GPUs, before it imports torch."""
    assert "torch" not in sys.modules, "torch has looked for a GPU already"
    native = ctypes.CDLL(os.environ["GPU_LIBRARY"])  # torch needs it during its import
    finder = _Finder(_functions(native.s3cache_device, native.s3cache_exchange_device))
    sys.meta_path.insert(0, finder)
    import torch

    sys.meta_path.remove(finder)
    torch.cuda.init()
    torch.cuda.set_device(int(os.environ.get("GPU_INDEX", "0")))
    _replace_driver(properties())
    _replace_memory_and_clock()
    _replace_cpp()


def tensors() -> AbstractContextManager[Any]:
    """Make all tensors fake while the block runs: each has a device, and no data."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# -- on the machine that runs the tests


def _library() -> Path:
    """Return the library of ``standin.cpp``; build it if no earlier run has."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    source = Path(__file__).with_name("standin.cpp")
    digest = hashlib.sha256(source.read_bytes())
    digest.update((torch / "version.py").read_bytes() + str(torch).encode())
    library = ROOT / "build" / "standin" / f"{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        built = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{torch}/include", str(source)]
        command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
        # s3cache reads the version of the driver from a library of this name.
        subprocess.run([*command, "-Wl,-soname,libcuda.so.1", "-o", str(built)], check=True)
        built.rename(library)
    return library


# -- torch


def _functions(device: Callable[[], int], exchange: Callable[[int], int]) -> dict[str, Any]:
    """Return the functions of ``torch._C`` in a CUDA build that are called here."""

    def init() -> None:
        import torch

        vars(torch.cuda).update(
            _get_device_properties=lambda index: properties(),
            default_generators=tuple(torch.Generator() for _ in range(COUNT)),
        )

    return {
        "_CudaDeviceProperties": Properties,
        "_StaticCudaLauncher": _StaticLauncher,
        "_cudart": types.ModuleType("torch._C._cudart"),
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_exchangeDevice": lambda index: exchange(index),
        "_cuda_getArchFlags": lambda: "",
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_getDevice": lambda: device(),
        "_cuda_getDeviceCount": lambda: COUNT,
        "_cuda_init": init,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_maybeExchangeDevice": lambda index: exchange(index),
        "_cuda_setDevice": lambda index: exchange(index),
        "_cuda_synchronize": lambda: None,
    }


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that adds functions to ``torch._C`` before torch looks for them."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch._C":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            vars(module).update(self._functions)
            version = vars(sys.modules["torch.version"])
            version.update({"hip": "6.4.0"} if properties().gcnArchName else {"cuda": "12.8"})

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _replace_memory_and_clock() -> None:
    """Make torch create tensors without memory, and measure kernels without a clock."""
    import torch
    from torch._inductor.runtime import benchmarking

    def empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def reinterpret(tensor: Any, size: Any, stride: Any, offset: int) -> Any:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    vars(torch._C._dynamo.guards).update(
        _empty_strided_cuda=empty_strided, _reinterpret_tensor=reinterpret
    )
    for kind in "cuda", "hip":
        benchmarking.register_benchmarker(kind, _measure, override=True)


def _replace_cpp() -> None:
    """Replace the library of generated C++, which needs CUDA's headers and runtime.

    The first call of the replacement makes torch compile and launch each of its kernels, as the
    library does. Each call returns tensors like the first input.
    """
    import torch
    from torch._inductor.codecache import CppWrapperCodeCache

    def load(
        cls: type, /, *, main_code: str, num_outputs: int, **rest: object
    ) -> Callable[[list[Any]], list[Any]]:
        sources = re.findall(r'R"TRITON\((.*?)\)TRITON"', main_code, re.DOTALL)
        names = [each.split("'")[1] for each in sources]
        launch = functools.cache(lambda: _launch_first(dict(zip(names, sources, strict=True))))

        def call(inputs: list[Any]) -> list[Any]:
            launch()
            return [torch.empty_like(inputs[0]) for _ in range(num_outputs)]

        return call

    vars(torch._C._aoti).update(
        unsafe_alloc_void_ptrs_from_tensors=list, alloc_tensors_by_stealing_from_void_ptrs=list
    )
    setattr(CppWrapperCodeCache, "load_pybinding", classmethod(load))  # noqa: B010 - for mypy


def _launch_first(sources: dict[str, str]) -> None:
    import torch
    from torch._inductor.runtime import triton_lazy_compile as kernels

    pending: dict[str, Any] = {}
    for name, source in sources.items():
        kernels.start_kernel_compile(pending, name, source)
    for name in sources:
        types = pending[name].triton_meta["signature"].values()
        values = [torch.empty(1) if kind[0] == "*" else 1 for kind in types if kind != "constexpr"]
        kernels.run_triton_kernel_with_autotune(pending, name, 0, values)


# -- Triton, and what it loads onto a device


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel on the device."""

    name: str
    image: bytes
    device: int

    @functools.cached_property
    def code(self) -> str:
        """A digest of the machine code; other parts of the image also name its source files."""
        table, size, count, names = struct.unpack_from("<40xQ10xHHH", self.image)[:4]
        headers = [
            struct.unpack_from("<II16xQQ", self.image, table + size * each) for each in range(count)
        ]
        where = headers[names][2]
        digest = hashlib.sha256()
        for name, _, offset, length in headers:
            if self.image.startswith(b".text", where + name):
                digest.update(self.image[offset : offset + length])
        return digest.hexdigest()[:16]

    @property
    def time_ms(self) -> float:
        """The running time: equal for equal code, and seldom equal for different code."""
        return 1 + int(self.code, 16) / 2**64


#: The kernels that this process launched, in order.
launched: list[Kernel] = []

#: Functions that are called before a kernel is measured in this process.
before_measuring: list[Callable[[], None]] = []


def _launch(kernel: Kernel) -> None:
    counts["launch"] += 1
    launched.append(kernel)


def _measure(benchmarker: object, function: Callable[[], object], **options: object) -> float:
    """Call ``function`` once, and return the running time of the kernels that it launched."""
    counts["benchmark"] += 1
    for call in before_measuring:
        call()
    before = len(launched)
    function()
    times = [kernel.time_ms for kernel in launched[before:]]
    del launched[before:]
    counts["launch"] -= len(times)
    return sum(times) or 1.5  # a function that launches none calls a library


class _StaticLauncher:
    """The launcher with which torch itself loads and launches kernels."""

    @staticmethod
    def _load_kernel(
        path: str, name: str, shared: int, device: int
    ) -> tuple[int, Kernel, int, int]:
        return 1, Kernel(name, Path(path).read_bytes(), device), 32, 0

    @staticmethod
    def _launch_kernel(kernel: Kernel, *arguments: object) -> None:
        _launch(kernel)

    @staticmethod
    def _unload_kernel(module: int) -> None:
        pass


def _replace_driver(gpu: Properties) -> None:
    """Give Triton a driver that has a target and launches nothing, and count its compiles."""
    import torch
    from triton import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.compiler import compiler

    is_amd = bool(gpu.gcnArchName)
    arch = gpu.gcnArchName.partition(":")[0] if is_amd else gpu.major * 10 + gpu.minor

    class Utilities:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {
                "max_shared_mem": gpu.shared_memory_per_block_optin,
                "max_num_regs": gpu.regs_per_multiprocessor,
                "multiprocessor_count": gpu.multi_processor_count,
                "warpSize": gpu.warp_size,
                "sm_clock_rate": gpu.clock_rate,
                "mem_clock_rate": gpu.memory_clock_rate,
                "mem_bus_width": gpu.memory_bus_width,
            }

        def load_binary(
            self, name: str, image: bytes, shared: int, device: int
        ) -> tuple[int, Kernel, int, int, int]:
            return 1, Kernel(name, image, device), 32, 0, gpu.max_threads_per_block

        def unload_module(self, module: int) -> None:
            pass

    class Launcher:
        def __init__(self, source: object, metadata: object) -> None:
            pass

        def __call__(self, x: int, y: int, z: int, stream: int, kernel: Kernel, *rest: Any) -> None:
            _launch(kernel)

    class Driver(GPUDriver):  # type: ignore[misc]
        launcher_cls = Launcher
        utils = Utilities()

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("hip" if is_amd else "cuda", arch, gpu.warp_size)

        def get_active_torch_device(self) -> Any:
            return torch.device("cuda", self.get_current_device())

        def get_device_interface(self) -> Any:
            return torch.cuda

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Callable[..., list[float]]:
            return lambda call, *, quantiles, **options: [_measure(None, call)] * len(quantiles)

    name, assemble = ("amd", "make_hsaco") if is_amd else ("nvidia", "make_cubin")
    backends.backends[name] = dataclasses.replace(backends.backends[name], driver=Driver)
    assembler = backends.backends[name].compiler
    counted = _counted("ptxas", getattr(assembler, assemble))
    setattr(assembler, assemble, staticmethod(counted) if is_amd else counted)
    import triton

    compiler.compile = triton.compile = _counted("triton.compile", compiler.compile)


def _counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        return function(*args, **kwargs)

    # It looks like Triton's own: s3cache checks which module calls Triton.
    there = {**globals(), "__name__": "triton.standin"}
    replacement = types.FunctionType(counted.__code__, there, closure=counted.__closure__)
    return functools.wraps(function)(replacement)
