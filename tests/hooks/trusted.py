"""Programs on machines that use what a trusted key has signed, and nothing else."""

from __future__ import annotations

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
