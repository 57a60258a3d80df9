"""Modules that their importer imports at its first use of them."""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from s3cache.features.startup.later import import_later
from s3cache.util.importing import when_imported

_LEFT_OUT = """\
import left_out as out

class User:
    def made(self, given: out.Thing) -> out.Thing:
        return out.Thing()

    @staticmethod
    def kind() -> type[int]:
        return out.Thing

    @property
    def name(self) -> out.Thing:
        return out.NAME

def seen(*, name: out.Thing = None) -> str:
    return out.NAME
"""
_NEEDED: dict[str, str] = {
    "a base": "import left_out as out\nclass User(out.Thing): pass\n",
    "a table": "import left_out as out\ndef f(x: out.Thing): pass\nKINDS = (out.Thing,)\n",
    "a name": "from left_out import Thing\n",
    "a member": "import left_out as out\nassert out.NAME == 'left out'\n",
    "nothing": "def f(): import left_out\n",
}


@pytest.fixture
def left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "left_out.py").write_text("NAME = 'left out'\nclass Thing: pass\n")
    yield tmp_path
    sys.modules.pop("left_out", None)


def test_a_module_is_imported_when_a_function_needs_it(left_out: Path) -> None:
    """Annotations are as in a module that does not evaluate them."""
    (left_out / "importing_later.py").write_text(_LEFT_OUT)
    executed: list[str] = []
    import_later("importing_later", "left_out")
    when_imported("importing_later", lambda: executed.append("once"))
    importer = import_module("importing_later")
    assert "left_out" not in sys.modules
    assert executed == ["once"]
    assert importer.User.made.__annotations__ == {"given": "out.Thing", "return": "out.Thing"}
    assert importer.seen.__annotations__ == {"name": "out.Thing", "return": "str"}

    assert importer.seen() == "left out"
    module = sys.modules["left_out"]
    assert typing.get_type_hints(importer.User.made)["return"] is module.Thing
    assert importer.User.kind() is importer.out.Thing is module.Thing
    assert importer.User().name == "left out"
    assert importlib.reload(importer).out is module


@pytest.mark.parametrize("needed", _NEEDED)
def test_a_module_that_is_needed_at_once_is_imported_at_once(left_out: Path, needed: str) -> None:
    """The importer then has no trace of the stand-in."""
    name = "needing_" + needed.replace(" ", "_")
    (left_out / f"{name}.py").write_text(_NEEDED[needed])
    (left_out / f"{name}_alone.py").write_text(_NEEDED[needed])
    import_later(name, "left_out")
    importer, alone = import_module(name), import_module(f"{name}_alone")
    assert ("left_out" in sys.modules) == (needed != "nothing")
    assert vars(importer).keys() == vars(alone).keys()
    assert vars(importer).get("out") is vars(alone).get("out")


def test_an_error_of_the_importer_is_raised_as_usual(left_out: Path) -> None:
    (left_out / "failing_later.py").write_text("import left_out as out\nraise ValueError('its')\n")
    import_later("failing_later", "left_out")
    with pytest.raises(ValueError, match="its"):
        import_module("failing_later")
    assert "failing_later" not in sys.modules


def test_a_module_that_is_imported_already_stays(left_out: Path) -> None:
    """If it was imported since, or is missing, this is noticed when its importer is imported."""
    for name in ("between", "present"):
        (left_out / f"importing_{name}.py").write_text(_LEFT_OUT)
    (left_out / "lacking_later.py").write_text("import left_out_never as out\n")
    import_later("lacking_later", "left_out_never")
    with pytest.raises(ModuleNotFoundError, match="left_out_never"):
        import_module("lacking_later")
    import_later("importing_between", "left_out")
    present = import_module("left_out")
    assert import_module("importing_between").out is present
    finders = [*sys.meta_path]
    import_later("importing_present", "left_out")
    assert sys.meta_path == finders
    assert import_module("importing_present").out is present
    import_later("importing_never", "left_out_never")()
    assert sys.meta_path == finders
