"""The inputs of keys on a machine with a GPU: written there, compared here."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from s3cache.errors import ConfigError
from s3cache.features.target import TARGET
from s3cache.features.target.standin import environment
from s3cache.util.options import INERT_DEVICE

SCHEMA = 1
_KIND, _PARTS = "s3cache target", ("versions", "device", "key")
_HOW = "write it on a machine that has the GPU, in the environment of the job: "
_HOW += "s3cache target > gpu.json"
# Triton's names of properties, and torch's. Some releases of torch lack some of them.
_TRITON_PROPERTIES = {
    "max_num_regs": "max_num_regs",
    "sm_clock_rate": "clock_rate",
    "mem_clock_rate": "memory_clock_rate",
    "mem_bus_width": "memory_bus_width",
}
_MAX_SHOWN = 160


def target() -> dict[str, Any]:
    """Describe this machine's GPU in JSON, for s3cache warm --target FILE elsewhere (experimental).

    The description has the inputs of keys on the GPU: the device and its driver, torch, Triton, and
    the settings of this environment. Write it in the image and environment of the job in
    production.
    """
    # ``key`` has the components of the key of a small graph on the first GPU, with their digests.
    import torch

    from s3cache.hooks import check  # here, as --help needs neither
    from s3cache.torch_api import internals

    versions = _versions()
    _check_build(versions, "")
    if not torch.cuda.is_available():
        problem = f"torch {versions['torch']} finds none"
        raise ConfigError("the GPU", problem, "run this on a machine that has one")
    device: dict[str, Any] = internals.shared_properties(torch.device("cuda", 0))
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(0)
    for name, ours in _TRITON_PROPERTIES.items():
        device.setdefault(ours, properties[name])
    (graph,) = check(_probe, torch.empty(8, device="cuda")).graphs
    if graph.key is None:
        reasons = "; ".join(map(str, graph.reasons))
        raise ConfigError("graphs of this machine", f"have no key: {reasons}", "see s3cache doctor")
    return {
        _KIND: SCHEMA,
        "versions": versions,
        "device": {**device, "count": torch.cuda.device_count()},
        "key": {
            name: [each.digest, each.parts.get("", each.value)]
            for name, each in graph.components.items()
        },
    }


def _probe(x: Any) -> Any:
    return x + 1


def _versions() -> dict[str, str | None]:
    import torch

    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return {
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "Triton": triton,
        "Python": sys.implementation.cache_tag,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _check_build(versions: Mapping[str, str | None], wanted: str) -> None:
    if versions["CUDA"] is None:
        raise ConfigError(
            f"torch {versions['torch']}",
            "is built without CUDA; no machine with a GPU looks up its keys",
            f"install a build of torch{wanted and f' {wanted}'} that has CUDA: it needs no GPU",
        )
    if versions["Triton"] is None:
        fix = f"install the version that torch {versions['torch']} requires"
        raise ConfigError("Triton", "is not installed; torch needs it to compile for GPUs", fix)


@contextmanager
def stand_in(path: str) -> Iterator[dict[str, str | None]]:
    """Yield environment variables that make processes compile for the GPU described in a file.

    First a process with these variables describes the GPU that it finds. Its description must equal
    the file, byte for byte.

    Raises:
        ConfigError: this machine would compute other keys than the machine with the GPU (the error
            lists every difference), or the stand-in cannot be built here.
    """
    target = _read(path)
    versions = _versions()
    _check_build(versions, target["versions"]["torch"])
    _compare(path, {"versions": target["versions"]}, {"versions": versions})
    with environment(target["device"]) as variables:
        _compare(path, target, _describe_in_child(variables))
        named = {name: versions[name] for name in ("torch", "Python")}
        yield {
            **variables,
            "CUDA_VISIBLE_DEVICES": None,
            INERT_DEVICE: "1",
            TARGET: json.dumps(named),
        }


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        schema = found[_KIND]
        parts = {} if schema != SCHEMA else {each: {**found[each]} for each in _PARTS}
    except OSError as exc:
        problem = f"cannot be read ({exc.strerror})"
        if re.fullmatch(r"(sm|compute)?_?\d+[af]?", path):
            problem = "is an architecture; keys also depend on the GPU's name, number of "
            problem += "multiprocessors, memory, driver and more, so a file must list them"
        raise ConfigError(f"target {path}", problem, _HOW) from None
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"target {path}", "describes no GPU", _HOW) from None
    if schema != SCHEMA:
        raise ConfigError(f"target {path}", f"was written by another s3cache ({schema})", _HOW)
    return {_KIND: schema, **parts}


def _describe_in_child(variables: Mapping[str, str]) -> dict[str, Any]:
    # The cache was off when the file was written.
    kept = {k: v for k, v in os.environ.items() if k not in ("S3CACHE_URL", "CUDA_VISIBLE_DEVICES")}
    ended = subprocess.run(
        [sys.executable, "-m", "s3cache", "target"],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        description: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        said = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
        fix = "compile on a machine that has the GPU"
        raise ConfigError(
            "the stand-in for the GPU", f"does not work here: {said[-1]}", fix
        ) from None
    return description


def _compare(path: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ConfigError if the two differ; the error lists every difference."""
    differences = []
    for part in _PARTS:
        theirs, ours = there.get(part, {}), here.get(part, {})
        for name in {**theirs, **ours}:
            if (one := theirs.get(name)) != (other := ours.get(name)):
                differences.append(
                    f"{name} is {_format(one, other)} there and {_format(other, one)} here"
                )
    if differences:
        raise ConfigError(
            f"target {path}",
            f"its machine computes other keys than this one: {'; '.join(differences)}",
            "install and set the same here, or write the file again if that machine has changed",
        )


def _format(value: Any, other: Any) -> str:
    """Format a version, a property, or the words of a component that the other one lacks."""
    if isinstance(value, list):
        digest, text = value
        known = other[1].split() if isinstance(other, list) else []
        words = " ".join(word for word in text.split() if word not in known)
        value = words[:_MAX_SHOWN] or f"other ({digest[:8]})"
    return "absent" if value is None else str(value)
