"""Keys of a graph on machines with a GPU that differ in one property; each one is a fork."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from tests.support.gpu import standin

#: Changes of a machine that change the key.
IN_KEY: dict[str, dict[str, str]] = {
    "name": {"GPU_NAME": "NVIDIA H100 PCIe"},
    "compute capability": {"GPU_MINOR": "1"},
    "multiprocessors": {"GPU_MULTI_PROCESSOR_COUNT": "114"},
    "shared memory": {"GPU_SHARED_MEMORY_PER_BLOCK_OPTIN": "166912"},
    "registers": {"GPU_REGS_PER_MULTIPROCESSOR": "32768"},
    "threads": {"GPU_MAX_THREADS_PER_MULTI_PROCESSOR": "1536"},
    "cache": {"GPU_L2_CACHE_SIZE": "41943040"},
    "driver": {"GPU_DRIVER": "13000"},
    "CUDA": {"KEYS_CUDA": "13.0"},
    "Triton": {"KEYS_TRITON": "of another build"},
    "Triton's environment": {"TRITON_F32_DEFAULT": "ieee"},
}
#: Changes of a machine that keep the key: such machines share a graph.
NOT_IN_KEY: dict[str, dict[str, str]] = {
    "memory": {"GPU_TOTAL_MEMORY": "1073741824"},
    "identity": {"GPU_UUID": "1-2-3", "GPU_PCI_BUS_ID": "7"},
    "index": {"KEYS_INDEX": "3"},
    "processor": {"KEYS_PROCESSOR": "DEFAULT"},
    "host name": {"KEYS_HOST": "elsewhere", "HOSTNAME": "elsewhere"},
    "user": {"USER": "somebody", "LOGNAME": "somebody"},
    "directories": {"KEYS_DIRECTORIES": "others"},
}


def keys(names: list[str]) -> dict[str, list[object]]:
    """Return the key and the names of its components without a change, and with each of these."""
    standin.install()
    import torch

    import s3cache

    # All forks share what this imports and computes.
    s3cache.check(lambda x: x.sin().sum(-1), torch.ones(16, 64))
    rows = {**IN_KEY, **NOT_IN_KEY}
    changes = {"nothing": {}, **{name: rows[name] for name in names}}
    return {what: _in_fork(_key, change) for what, change in changes.items()}


def _in_fork(function: Callable[[dict[str, str]], object], changes: dict[str, str]) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(function(changes)).encode())
        except BaseException as exc:
            print(f"{changes}: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        received = pipe.read()
    os.waitpid(child, 0)
    assert received, f"{changes}: the fork returned nothing"
    return json.loads(received)


def _key(changes: dict[str, str]) -> list[object]:
    import torch
    from torch._inductor import codecache

    import s3cache

    codecache.CacheBase.get_system.cache_clear()
    os.environ.update(changes)
    if "KEYS_CUDA" in changes:
        torch.version.cuda = changes["KEYS_CUDA"]
    if "KEYS_INDEX" in changes:
        torch.cuda.set_device(int(changes["KEYS_INDEX"]))
    if "KEYS_TRITON" in changes:
        vars(codecache)["triton_key"] = lambda: changes["KEYS_TRITON"]
    if "KEYS_PROCESSOR" in changes:
        torch.set_num_threads(1)
        vars(torch.backends.cpu)["get_cpu_capability"] = lambda: changes["KEYS_PROCESSOR"]
    if "KEYS_HOST" in changes:
        import platform
        import socket

        for module, name in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
            setattr(module, name, lambda *_: changes["KEYS_HOST"])
    if "KEYS_DIRECTORIES" in changes:
        place = tempfile.mkdtemp()
        os.environ.update(dict.fromkeys(("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), place))
        os.chdir(place)
    with standin.tensors(), torch.device("cuda"), torch.no_grad():
        (graph,) = s3cache.check(lambda x: x.sin().sum(-1), torch.randn(16, 64)).graphs
    found: dict[str, Any] = graph.as_dict()
    return [found["key"], sorted(found["components"])]
