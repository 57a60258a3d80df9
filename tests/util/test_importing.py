"""Callbacks around the import of a module, which no other importer notices."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from s3cache.util.importing import before_import, when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that has not been imported."""
    name = f"module_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("import sys\nseen = [*map(id, sys.meta_path)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_callbacks_run_before_and_after_the_import(module: str) -> None:
    """The first callback may register another one for the same module."""
    order: list[tuple[str, bool]] = []
    finders = [*sys.meta_path]

    def ran() -> bool:
        return hasattr(sys.modules.get(module), "seen")

    def after() -> None:
        order.append(("after", ran()))

    def before() -> None:
        order.append(("before", ran()))
        when_imported(module, after)

    before_import(module, before)
    withdrawn = before_import(module, lambda: order.append(("withdrawn", True)))
    withdrawn()
    assert import_module(module)
    assert order == [("before", False), ("after", True)]
    assert sys.meta_path == finders
    before_import(module, before)  # at once
    assert order[2:] == [("before", True), ("after", True)]


def test_a_concurrent_import_of_another_module_asks_each_finder(module: str) -> None:
    """Python iterates over the list itself, and other threads may change it between two finders."""
    before_import(module, lambda: None)
    finders, asked = [*sys.meta_path], []
    for finder in sys.meta_path:
        import_module(module)
        asked.append(finder)
    assert asked == finders
