"""A small program on two machines, without some features of s3cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Missing:
    """Makes packages of features impossible to import, as if their folders were not there."""

    def __init__(self, features: Sequence[str]) -> None:
        self._packages = tuple(f"s3cache.features.{name}" for name in features)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if any(name == package or name.startswith(f"{package}.") for package in self._packages):
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)


def shares(features: Sequence[str], url: str, local: str) -> dict[str, Any]:
    """Compile on a machine that lacks ``features``; return the counts and the features."""
    assert not any(name.startswith("s3cache.features.") for name in sys.modules)
    sys.meta_path.insert(0, _Missing(features))
    import torch

    import s3cache
    from s3cache.seam import features as found

    def program(x: Any) -> Any:
        return (x @ x.sin()).relu().sum()

    with s3cache.enabled(url, local_dir=Path(local), strict=True) as cache:
        x = torch.arange(9.0).reshape(3, 3).requires_grad_()
        result = torch.compile(program)(x)
        result.backward()
        report = cache.flush(60)
        stats = cache.stats()
    torch.testing.assert_close(result, program(x))
    return {
        "hits": dict(stats.hits),
        "saved": stats.saved,
        "complete": report.complete,
        "features": [feature.name for feature in found()],
    }
