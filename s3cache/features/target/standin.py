"""The stand-in for a GPU: a library that is built on this machine and loaded before torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from s3cache.errors import ConfigError
from s3cache.features.target import STANDIN
from s3cache.store import private_directory

# Other major releases have other functions, and structures with another layout.
_MAJOR = 13
_SOURCE = Path(__file__).with_name("device.c")
# CUDA's Python packages lack crt/host_defines.h, which defines these for each compiler.
_MARKS = """
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
"""
# torch and Triton look up functions of the driver by name, all of these at once.
_DRIVER = """
cuInit cuModuleUnload cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel
cuFuncSetAttribute cuFuncSetCacheConfig cuCtxSetCurrent cuCtxSynchronize cuCtxPushCurrent
cuCtxPopCurrent cuCtxFromGreenCtx cuCtxGetLimit cuCtxSetLimit cuDevicePrimaryCtxSetFlags_v2
cuDeviceGetUuid cuOccupancyMaxActiveClusters cuTensorMapEncodeTiled cuLinkCreate cuLinkAddData
cuLinkComplete cuLinkDestroy cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemMap cuMemUnmap
cuMemRelease cuMemSetAccess cuMemGetAddressRange cuMemGetAllocationGranularity cuMemsetD32Async
cuMemGetAllocationPropertiesFromHandle cuMemRetainAllocationHandle cuMemExportToShareableHandle
cuMemImportFromShareableHandle cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem
cuMulticastUnbind cuStreamWriteValue32 cuStreamGetCtx cuPointerGetAttributes cuKernelGetAttribute
cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate cuDeviceGetDevResource
cuDevSmResourceSplitByCount cuDevResourceGenerateDesc cuLogsRegisterCallback
cuLogsUnregisterCallback
"""
# Functions that compute or copy: their stubs do nothing but count the call.
_COMPUTES = re.compile(r"Launch|Memcpy|Memset|^cublas")


@contextmanager
def environment(device: Mapping[str, object]) -> Iterator[dict[str, str]]:
    """Build the stand-in; yield environment variables that make processes find the device.

    ``device`` is that of a description. The library is in a directory where no other user can
    replace it, and is removed at the end of the block.

    Raises:
        ConfigError: the stand-in cannot be built here.
    """
    directory, remove = private_directory()
    try:
        library = _build(Path(directory))
        said = {name: str(value) for name, value in device.items()}
        yield {
            "LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")])),
            "LD_LIBRARY_PATH": _path(directory, os.environ.get("LD_LIBRARY_PATH")),
            "TRITON_LIBCUDA_PATH": directory,
            "LIBRARY_PATH": _path(directory, os.environ.get("LIBRARY_PATH")),
            STANDIN: ";".join(f"{name}={value.replace(';', ',')}" for name, value in said.items()),
        }
    finally:
        remove()


def _path(*parts: str | None) -> str:
    return os.pathsep.join(filter(None, parts))


def _build(directory: Path) -> Path:
    """Build the stand-in for the torch that is installed."""
    import torch

    packages = Path(torch.__file__).parents[1]
    version = str(torch.version.cuda)
    major, minor = map(int, version.split(".")[:2])
    if major != _MAJOR:
        problem = f"is built with CUDA {version}; the stand-in supports CUDA {_MAJOR} only"
        fix = f"install a build of torch with CUDA {_MAJOR}, or compile on a machine with the GPU"
        raise ConfigError(f"torch {torch.__version__}", problem, fix)
    headers = _headers(packages)
    (directory / "crt").mkdir()
    (directory / "crt/host_defines.h").write_text(_MARKS)
    compile_ = ["cc", "-O1", "-fPIC", "-w", "-I.", f"-I{headers}", "-c"]
    runtime = f"-DRUNTIME={1000 * major + 10 * minor}"
    _run([*compile_, runtime, str(_SOURCE)], directory)
    there = {line.split()[-1] for line in _run(["nm", "--defined-only", "device.o"], directory)}
    names = ("torch_cuda", "c10_cuda", "torch_python")
    files = [packages / f"torch/lib/lib{name}.so" for name in names]
    libraries = [str(file) for file in files if file.exists()]
    asked = {*_DRIVER.split()}
    for line in _run(["nm", "-D", "--undefined-only", *libraries], directory):
        # The linker may name the version of a symbol.
        if match := re.search(r" U ((?:cuda[A-Z]|cublas)\w*)", line):
            asked.add(match[1])
    lines = ["int s3cache_launch(void);"]
    for name in sorted(asked - there):
        lines.append(
            f"int {name}(void) {{ return {'s3cache_launch()' if _COMPUTES.search(name) else 0}; }}"
        )
    (directory / "nothing.c").write_text("\n".join(lines))
    _run([*compile_, "nothing.c"], directory)
    library = directory / "libcuda.so.1"
    link = ["cc", "-shared", f"-Wl,-soname,{library.name}", "device.o", "nothing.o"]
    _run([*link, "-o", library.name, "-ldl"], directory)
    (directory / "libcuda.so").symlink_to(library.name)  # for linkers
    return library


def _headers(packages: Path) -> Path:
    """Find the headers of the major release of CUDA that torch is built with."""
    places = [packages / f"nvidia/cu{_MAJOR}/include"]
    homes = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"
    places += [Path(home, "include") for home in homes if home]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends/nvidia/include")
    for place in places:
        header = place / "cuda_runtime_api.h"
        if (place / "cuda.h").exists() and header.exists():
            found = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text("utf-8"))
            if found and int(found[1]) // 1000 == _MAJOR:
                return place
    raise ConfigError(
        f"headers of CUDA {_MAJOR}",
        f"were not found (cuda_runtime_api.h in {', '.join(map(str, places))})",
        "set CUDA_HOME to a directory that has them in include/",
    )


def _run(command: list[str], directory: Path) -> list[str]:
    """Run a command in a directory and return the lines it prints."""
    try:
        ended = subprocess.run(  # noqa: S603 - a compiler, and nm
            command, cwd=directory, capture_output=True, text=True, check=True
        )
    except OSError as exc:
        fix = "install a C compiler and binutils (Debian: apt-get install gcc)"
        raise ConfigError(f"command {command[0]}", f"cannot be run ({exc.strerror})", fix) from None
    except subprocess.CalledProcessError as exc:
        said = (exc.stderr.strip().splitlines() or ["no output"])[0]
        fix = f"make sure that {command[0]} works; s3cache warm without --target does not need it"
        raise ConfigError("the stand-in for a GPU", f"cannot be built: {said}", fix) from None
    return ended.stdout.splitlines()
