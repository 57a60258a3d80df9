"""The properties of a machine with a GPU that a key depends on: the table of docs/keys.md.

Machines that differ in one property are forks of one process.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import in_child
from tests.support.gpu import standin
from tests.support.machines import ROOT
from tests.support.marks import cases, selected

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
#: Properties that reach the key in the same way as others.
SIMILAR = {
    *("compute capability", "multiprocessors", "shared memory", "registers", "threads", "cache"),
    *("CUDA", "Triton's environment", "memory", "identity", "processor", "host name", "user"),
}


@pytest.mark.skipif("CI" not in os.environ, reason="only CI has to have a stand-in")
def test_ci_skips_no_test_of_the_stand_in() -> None:
    assert standin.MISSING in ("", standin.WITH_CUDA)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if standin.MISSING:
        pytest.skip(standin.MISSING)
    machine = standin.machine(tmp_path_factory.mktemp("keys"))
    return machine.run(f"{__name__}:_keys", [*selected(request, "what")]).result


@pytest.mark.parametrize("what", cases(IN_KEY, slow_ones=SIMILAR))
def test_a_change_of_a_property_in_the_key_changes_the_key(found: Any, what: str) -> None:
    assert found[what][0] != found["nothing"][0]


@pytest.mark.parametrize("what", cases(NOT_IN_KEY, slow_ones=SIMILAR))
def test_a_change_of_another_property_keeps_the_key(found: Any, what: str) -> None:
    assert found[what] == found["nothing"]


def test_the_processor_is_not_a_component_of_the_key(found: Any) -> None:
    components = found["nothing"][1]
    assert "machine.accelerator" in components
    assert not {"machine.isa", "torch.cpu_capability", "torch.num_threads"} & set(components)


def test_the_documentation_lists_each_property() -> None:
    text = Path(ROOT, "docs/keys.md").read_text(encoding="utf-8")
    table = text.partition("\n## GPUs\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| (yes|no) \|", table, re.MULTILINE)
    expected = [(what, "yes") for what in IN_KEY] + [(what, "no") for what in NOT_IN_KEY]
    assert rows == expected


# -- the job


def _keys(names: list[str]) -> dict[str, list[object]]:
    """Return the key and the names of its components without a change, and with each of these."""
    standin.install()
    import torch

    import s3cache

    # All forks share what this imports and computes.
    s3cache.check(lambda x: x.sin().sum(-1), torch.ones(16, 64))
    rows = {**IN_KEY, **NOT_IN_KEY}
    changes = {"nothing": {}, **{name: rows[name] for name in names}}
    found: dict[str, list[object]] = {}
    for what, change in changes.items():
        found[what], error = in_child(functools.partial(_key, change), 600, os.devnull)
        assert not error, f"{what}: {error}"
    return found


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
