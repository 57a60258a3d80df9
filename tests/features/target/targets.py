"""Jobs about absent GPUs: their descriptions, and the library in place of a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.gpu import standin

#: Differences between two machines: each has the place of a value and the other value.
CHANGES: dict[str, tuple[str, str, Any]] = {
    "torch": ("versions", "torch", "9.9.0+cu999"),
    "Triton": ("versions", "Triton", "0.1"),
    "Python": ("versions", "Python", "cpython-399"),
}
# Calls the preloaded library as torch and Triton do.
_ASKS = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
name, number = ctypes.create_string_buffer(99), ctypes.c_int()
cuda.cuDeviceGetName(name, 99, 0)
def value_of(attribute):
    cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    return number.value
cuda.cuDriverGetVersion(ctypes.byref(number))
found = {"name": name.value.decode(), "driver": number.value}
found |= {"processors": value_of(16), "shared": value_of(97)}
found |= {"capability": [value_of(75), value_of(76)]}
cuda.cuDeviceGetCount(ctypes.byref(number))
launches = [cuda.s3cache_launches()]
cuda.cuModuleUnload(0)
launches.append(cuda.s3cache_launches())
cuda.cuLaunchKernel()
launches.append(cuda.s3cache_launches())
print(json.dumps({**found, "count": number.value, "launches": launches}))
"""


def description() -> dict[str, Any]:
    """Return a description, and the error here for each change of it."""
    standin.install()
    from s3cache import ConfigError
    from s3cache.features.target.description import stand_in, target

    with standin.tensors():
        described = target()
    refusals = {}
    for what, (part, name, value) in CHANGES.items():
        other = {**described, part: {**described[part], name: value}}
        Path("other.json").write_text(json.dumps(other))
        try:
            with stand_in("other.json"):
                pass
        except ConfigError as exc:
            refusals[what] = str(exc)
    return {"described": described, "refusals": refusals}


def preload(device: dict[str, Any]) -> dict[str, Any]:
    """Run processes with the library for a device; return what they find and save.

    One launches a kernel while it compiles, and another one has another torch than ``warm``.
    """
    with _library(device) as variables:
        environment = {**os.environ, **variables}
        probe = subprocess.run(
            [sys.executable, "-c", _ASKS], env=environment, check=True, capture_output=True
        )
        found: dict[str, Any] = json.loads(probe.stdout)
        for what in ("launching", "not launching", "another torch"):
            versions = {} if what == "another torch" else _versions()
            ended = subprocess.run(
                [sys.executable, "-m", "tests.features.target.targets", what],
                # A process with a stand-in does not recall.
                env={
                    **environment,
                    "S3CACHE_TARGET": json.dumps(versions),
                    "S3CACHE_RECALL": "off",
                },
                check=True,
                capture_output=True,
            )
            found[what] = json.loads(ended.stdout)
    return found


def _library(device: dict[str, Any]) -> Any:
    import torch

    from s3cache.features.target.standin import environment

    torch.version.cuda = "13.1"  # the version of Triton's headers
    return environment(device)


def _versions() -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__), "Python": str(sys.implementation.cache_tag)}


def compile_while(what: str) -> dict[str, Any]:
    """Compile graphs, and launch a kernel meanwhile or not; return saves and bypasses."""
    import torch
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    import s3cache

    class Launching(CustomGraphPass):  # type: ignore[misc,unused-ignore]
        def __call__(self, graph: object) -> None:
            if what == "launching":
                ctypes.CDLL("libcuda.so.1").cuLaunchKernel()

        def uuid(self) -> str:
            return "of this test"

    config.post_grad_custom_pre_pass = Launching()
    found: dict[str, Any] = {}
    with s3cache.enabled() as cache:
        for kind in "inference", "training":
            x = torch.ones(8, requires_grad=kind == "training")
            out = torch.compile(lambda x: x.sin() * 2)(x)
            if kind == "training":
                out.sum().backward()
            stats = cache.stats()
            found[kind] = [stats.saved, dict(stats.bypass_reasons)]
    return found


if __name__ == "__main__":
    print(json.dumps(compile_while(sys.argv[1])))
