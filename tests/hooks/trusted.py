"""Programs on machines that use what a trusted key has signed, and nothing else."""

from __future__ import annotations

from typing import Any

from tests.hooks.jobs import account


def product(x: Any, y: Any) -> Any:
    """A graph that Inductor compiles without a C++ compiler."""
    return (x @ y).t()


def compiled(url: str, artifacts: str = "", export: str = "") -> dict[str, Any]:
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
        assert torch.equal(torch.compile(product)(x, x), product(x, x))
        assert cache.flush(30).complete
        if export:
            saved = torch.compiler.save_cache_artifacts()
            assert saved is not None
            with open(export, "wb") as file:
                file.write(saved[0])
        return {**account(cache), "refused": dict(cache.stats().refused)}
