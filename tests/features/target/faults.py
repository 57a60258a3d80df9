"""Faults of a stand-in device: other devices miss, and an error of the driver loses no entry.

Then it compiles like a job of ``s3cache warm --target``: no entry contains a value that the device
should have computed but did not.

``faults.py FILE`` runs one small graph in fresh processes that share a store, each with another
device or driver. ``infra/gpu/standin.sh`` runs it, and pytest does not: it needs a CUDA build.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s3cache.features.target.standin import environment as standin

JOB = """
import json, torch, s3cache
cache = s3cache.enable()
x = torch.zeros(256, 256, device="cuda")
torch.compile(lambda x: x.relu().sum(1))(x)
cache.flush(60)
stats = cache.stats()
print(json.dumps([sum(stats.hits.values()), {str(r): n for r, n in stats.misses.items() if n}]))
"""
# Two graphs: torch folds a constant of the first, and times padding the matrices of the second.
FOLDING = """
import json, torch, s3cache
from torch._inductor.utils import run_and_get_code
cache = s3cache.enable()
def folded(x):
    return x * (torch.ones(256, device="cuda") * 3)
_, (code,) = run_and_get_code(torch.compile(folded), torch.zeros(256, device="cuda"))
saved = cache.stats().saved
a, b = (torch.zeros(2049, 2049, device="cuda", dtype=torch.half) for _ in range(2))
torch.compile(lambda a, b: a @ b)(a, b)
stats = cache.stats()
print(json.dumps(["3.0" in code, saved, stats.saved - saved, dict(stats.bypass_reasons)]))
"""
#: Changes that make another device.
OTHERS: dict[str, dict[str, object]] = {
    "multiprocessors": {"multi_processor_count": 114},
    "compute capability": {"major": 8},
    "shared memory": {"shared_memory_per_block_optin": 166912},
    "driver": {"driver": 13000},
}
OUT_OF_MEMORY, NOT_INITIALIZED, OTHER_ARCHITECTURE = 2, 3, 209


def run(
    root: Path, device: Mapping[str, object], job: str = JOB, **environment: str
) -> tuple[Any, ...]:
    """Run a job on a new machine with the store; return what it prints, such as its hits."""
    root.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as machine, standin(device) as variables:
        places = ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "S3CACHE_LOCAL_DIR")
        for name in places:
            (Path(machine) / name).mkdir()
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", job],
            env={
                **{name: value for name, value in os.environ.items() if "XDG" not in name},
                **{name: f"{machine}/{name}" for name in places},
                "S3CACHE_URL": f"file://{root}/store",
                "S3CACHE_JOB_PROFILES": "0",
                "S3CACHE_PORTS": "off",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                **variables,
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


def stored(root: Path) -> dict[str, bytes]:
    """Return all entries in the store, by name."""
    files = (path for path in (root / "store").rglob("*") if path.is_file())
    return {path.name: path.read_bytes() for path in files}


def components(content: bytes) -> dict[str, Any]:
    """Return the components of an entry's key."""
    from s3cache import frame

    found = frame.decode(content).header.meta["components"]
    assert isinstance(found, dict)
    return found


def main(device: Mapping[str, object]) -> None:
    with tempfile.TemporaryDirectory(prefix="s3cache-gpu-") as directory:
        root = Path(directory)
        assert run(root, device) == (0, {"absent": 1})
        (entry,) = before = stored(root)
        made_of = components(before[entry])
        assert "machine.accelerator" in made_of
        assert not {"machine.isa", "torch.cpu_capability"} & set(made_of), (
            "a component of the processor"
        )
        for code in (OUT_OF_MEMORY, NOT_INITIALIZED, OTHER_ARCHITECTURE):
            assert run(root, {**device, "load_fails": f"{code}:1"}) == (0, {"device": 1}), code
            assert stored(root) == before, "the entry was set aside or replaced"
            print(f"driver's error {code}: a miss, and the entry stays")
        assert run(root, device) == (1, {})
        for what, change in OTHERS.items():
            assert run(root, {**device, **change}) == (0, {"absent": 1}), what
            print(f"other {what}: a miss")
        assert run(root, device, TRITON_F32_DEFAULT="ieee") == (0, {"absent": 1})
        print("other environment of Triton: a miss")
        import torch

        here = {"torch": str(torch.__version__), "Python": sys.implementation.cache_tag}
        found = run(root, device, FOLDING, S3CACHE_TARGET=json.dumps(here))
        assert found == (True, 1, 0, {"target": 1}), found
        found = run(root / "other", device, FOLDING)
        assert not found[0], "the constant is right without a target too"
        print("compiled without the GPU: constants are right, measured graphs are not saved")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text())["device"])
