"""Fixtures for the tests of keys and bypass reasons."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tests.support.compiler  # noqa: F401


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., types.ModuleType]]:
    """Return a function that installs a library of one module in its own directory."""
    made: list[str] = []

    def install(source: str, *, recorded: bool = True, version: str = "1.0") -> types.ModuleType:
        name = f"s3cache_library_{len(made)}"
        site = tmp_path / str(len(made)) / "target"  # as `pip install --target` names it
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(source, encoding="utf-8")
        described = site / f"{name}-{version}.dist-info"
        described.mkdir()
        line = f"{name}/__init__.py,sha256=1,1\n" if recorded else "other/a.py,,\n"
        (described / "RECORD").write_text(line, "utf-8")
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield install
    for name in made:
        del sys.modules[name]
