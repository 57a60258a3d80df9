"""Programs on machines that use what a trusted key has signed, and nothing else."""

from __future__ import annotations

import contextlib
import json
import sys
from types import ModuleType
from typing import Any

from tests.hooks.jobs import account


def product(x: Any, y: Any) -> Any:
    """A graph that Inductor compiles without a C++ compiler."""
    return (x @ y).t()


def waved(x: Any, y: Any) -> Any:
    """A graph with a native kernel."""
    return (x @ y).sin() * 2


def waving(url: str) -> dict[str, Any]:
    """What compiling that one comes to."""
    return compiled(url, program=waved)


def lacking(url: str, content: str) -> dict[str, Any]:
    """The same, where this torch lacks a name, and remote caches answer with ``content``."""
    from s3cache.torch_api import Internal, internals

    _serve(content)
    vars(internals)["clear_caches"] = Internal("torch._guards:nonsense")
    return {**waving(url), "asked": len(_asked)}


def unsupported(url: str, content: str) -> dict[str, Any]:
    """The same, where this torch is older than any that s3cache knows."""
    from s3cache.torch_api import internals

    _serve(content)
    internals.OLDEST = (99, 0)
    return {**waving(url), "asked": len(_asked)}


def compiled(
    url: str, artifacts: str = "", export: str = "", program: Any = product
) -> dict[str, Any]:
    """What compiling it comes to.

    Args:
        artifacts: of torch's, to load before.
        export: where to put them to afterwards.
    """
    import torch

    import s3cache

    with s3cache.enabled(url) as cache:
        if artifacts:
            with open(artifacts, "rb") as file:
                torch.compiler.load_cache_artifacts(file.read())
        x = torch.arange(9.0).reshape(3, 3)
        assert torch.allclose(torch.compile(program)(x, x), program(x, x))
        assert cache.flush(30).complete
        if export:
            saved = torch.compiler.save_cache_artifacts()
            assert saved is not None
            with open(export, "wb") as file:
                file.write(saved[0])
        return {**account(cache), "refused": dict(cache.stats().refused)}


def from_each(urls: list[str]) -> list[dict[str, Any]]:
    """What compiling it comes to with each of these remotes, nothing else being kept."""
    import torch

    found = []
    for url in urls:
        torch.compiler.reset()
        found.append(compiled(url))
    return found


def poisoned(artifacts: str, into: str, evil: str) -> list[str]:
    """Put something else into each of torch's artifacts that is a pickle; returns their kinds."""
    from torch.compiler._cache import CacheArtifactManager, _serialize_single_cache
    from torch.utils._appending_byte_serializer import AppendingByteSerializer

    with open(artifacts, "rb") as file:
        found = CacheArtifactManager.deserialize(file.read())
    assert found is not None
    serializer = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    for kind, each_of in found.items():
        for each in each_of:
            if kind != "autotune":
                object.__setattr__(each, "content", bytes.fromhex(evil))
        serializer.append((kind, each_of))
    with open(into, "wb") as file:
        file.write(serializer.to_bytes())
    return sorted(found)


def loaded(url: str, artifacts: str) -> dict[str, Any]:
    """What comes of loading those before anything is compiled; ``url`` is "" for no cache."""
    import torch

    import s3cache

    with s3cache.enabled(url) if url else contextlib.nullcontext():
        with open(artifacts, "rb") as file:
            data = file.read()
        try:
            info = torch.compiler.load_cache_artifacts(data)
        except Exception as exc:
            return {"failed": str(exc)}
        assert info is not None
        return {"loaded": dict(info.artifacts)}


def redis(url: str, content: str) -> dict[str, Any]:
    """What compiling it comes to where torch's remote caches answer everything with ``content``."""
    _serve(content)
    return {**compiled(url), "asked": len(_asked)}


_asked: list[str] = []


def _serve(content: str) -> None:
    """A Redis without a server."""

    class Redis:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def get(self, key: str) -> bytes:
            _asked.append(key)
            return json.dumps({"data": content, "time_taken_ms": 1}).encode()

        def set(self, key: str, value: bytes) -> None:
            pass

    module = ModuleType("redis")
    errors = {"ConnectionError": ConnectionError, "exceptions": ModuleType("redis.exceptions")}
    vars(module).update(Redis=Redis, **errors)
    vars(errors["exceptions"]).update(ConnectionError=ConnectionError)
    sys.modules["redis"] = module


def checked(url: str) -> list[str | None]:
    """What ``check`` says that there is of each of its graphs: without a cache, and with one."""
    import torch

    import s3cache

    x = torch.arange(9.0).reshape(3, 3)
    alone = s3cache.check(product, x, x)
    with s3cache.enabled(url) as cache:
        found = s3cache.check(product, x, x)
        assert cache.stats().lookups == 0
    assert str(found.graphs[0].entry) in str(found)
    return [graph.entry for graph in (*alone.graphs, *found.graphs)]
