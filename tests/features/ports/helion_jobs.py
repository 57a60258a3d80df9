"""Jobs that use Helion's remote cache. They need no GPU and measure nothing."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

_GPU = "NVIDIA H100 80GB HBM3"


def run(*names: str) -> dict[str, Any]:
    """Put a configuration of each kernel; return the cache's contents before and after."""
    import helion  # noqa: F401
    from helion.autotuner import remote_cache
    from helion.runtime.settings import Settings

    assert Settings().autotune_cache == "RemoteAutotuneCache"
    backend = remote_cache._load_remote_backend()
    found = {"before": remote_cache._remote_get(backend, "key")}
    for data in ("first", "second"):
        remote_cache._remote_put(backend, "key", data)
    found["after"] = remote_cache._remote_get(backend, "key")
    for name in names:
        remote_cache._remote_put(backend, f"key of {name}", _record(name))
    return {
        **found,
        "listed": [_name_in(each) for each in backend.list()],
        "last": [_name_in(each) for each in backend.list(max_results=1)],
        "seeds": _seeds(),
        "of another device": _listed_for_another_device(backend),
    }


def _seeds() -> list[str]:
    """Return the kernels with the configurations that start a search in Helion."""
    from helion.autotuner.base_search import BaseSearch

    search: Any = SimpleNamespace(
        _skip_cache=False,
        _get_current_hardware_and_specialization=lambda: (_GPU, "float32"),
        config_spec=SimpleNamespace(cute_flash_search_enabled=False),
        kernel=SimpleNamespace(),
        log=logging.getLogger(__name__),
        settings=SimpleNamespace(autotune_best_available_max_cache_scan=10),
    )
    found = BaseSearch._find_similar_cached_configs(search, 20, config_spec_hash="spec")
    return [str(each.config["name"]) for each in found]


def _listed_for_another_device(backend: Any) -> list[str]:
    import torch

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda _: SimpleNamespace(
        name=_GPU, major=9, minor=0, multi_processor_count=132, total_memory=80
    )
    return [*backend.list()]


def _record(name: str) -> str:
    """Return Helion's record of a winner; the kernel ``other`` has inputs of another type."""
    from helion.runtime.config import Config

    kind = "float16" if name == "other" else "float32"
    fields = {"hardware": _GPU, "specialization_key": kind, "config_spec_hash": "spec"}
    key = {"type": "LooseAutotuneCacheKey", "fields": fields}
    config = Config(block_sizes=[64], name=name).to_json()
    return json.dumps({"config": config, "key": key, "flat_config": json.dumps([[64], name])})


def _name_in(record: str) -> str:
    from helion.autotuner.local_cache import parse_cache_entry

    try:
        return str(parse_cache_entry(record).config["name"])
    except ValueError:
        return record
