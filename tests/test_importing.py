"""Callbacks around the import of a module, which nobody else notices."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from s3cache._importing import before_import, when_imported

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that nobody has imported."""
    name = f"module_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("import sys\nseen = [*map(id, sys.meta_path)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_module_is_announced_before_it_runs_and_told_of_after(module: str) -> None:
    """What is put up by the first callback, for the same module, works too."""
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


def test_what_an_announcement_raises_the_import_raises(module: str) -> None:
    """Once: the module can be imported afterwards."""

    def refuse() -> None:
        raise ValueError("not now")

    before_import(module, refuse)
    with pytest.raises(ValueError, match="not now"):
        import_module(module)
    assert import_module(module)


def test_whoever_waits_for_a_module_is_told_of_it(module: str) -> None:
    told: list[str] = []
    when_imported(module, lambda: told.append("first"))
    when_imported(module, lambda: told.append("second"))
    before_import(module, lambda: told.append("before"))
    loaded = import_module(module)
    assert sorted(told[1:]) == ["first", "second"]
    assert told[0] == "before"
    assert loaded.__loader__ is loaded.__spec__.loader  # type: ignore[union-attr]
    assert type(loaded.__loader__).__module__ != "s3cache._importing"
