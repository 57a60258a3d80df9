"""The facts of a program change with the program, and agree between restarts of one job."""

from __future__ import annotations

import base64
import builtins
import hashlib
import importlib
import logging
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from s3cache.features.recall.program import Facts, Program, difference
from tests.support.marks import nightly


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Import a module of a user, from a file that is older than this process."""
    path = tmp_path / "settings_of_job.py"
    path.write_text("WIDTH = 4\ndef scale(x): return x * WIDTH\n")
    os.utime(path, (0, 0))
    monkeypatch.syspath_prepend(str(tmp_path))
    import settings_of_job  # type: ignore[import-not-found]

    yield settings_of_job
    del sys.modules["settings_of_job"]


def facts() -> dict[str, bytes]:
    return Program().facts()


def test_nothing_differs_while_nothing_changes(module: types.ModuleType) -> None:
    program = Program()
    before = program.facts()
    assert difference(program.facts(), [before]) == ""
    assert difference(facts(), [before]) == ""
    assert "WIDTH of settings_of_job" in before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("m.WIDTH = 5", "WIDTH of settings_of_job has changed"),
        ("m.WIDTH = True", "WIDTH of settings_of_job has changed"),
        ("m.flash = object()", "names of settings_of_job has changed"),
        ("del m.scale", "names of settings_of_job has changed"),
        ("builtins.flash = 1", "builtins has changed"),
        ("sys.modules['other_of_job'] = types.ModuleType('other_of_job')", "module other_of_job"),
        ("hooks['x'] = print", "hooks of torch has changed"),
        ("torch.set_default_dtype(torch.float64)", "state of torch has changed"),
        ("logging.disable(30)", "state of logging has changed"),
        ("os.environ['FLASH_OF_JOB'] = '1'", "names of environment variables has changed"),
    ],
)
def test_a_change_is_named(
    change: str, words: str, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    program = Program()
    before = program.facts()
    space = {"m": module, "builtins": builtins, "sys": sys, "types": types, "hooks": hooks}
    space |= {"torch": torch, "logging": logging, "os": os}
    try:
        exec(change, space)
        assert difference(program.facts(), [before]).startswith(words)
    finally:
        vars(builtins).pop("flash", None)
        sys.modules.pop("other_of_job", None)
        hooks.pop("x", None)  # type: ignore[call-overload]
        torch.set_default_dtype(torch.float32)
        logging.disable(logging.NOTSET)
        os.environ.pop("FLASH_OF_JOB", None)
    assert difference(facts(), [before]) == "" or "m." in change


@pytest.mark.parametrize(
    "change",
    [
        "m.options['depth'] = 3",
        "m.options['act'].append('gelu')",
        "m.space.inner.rate = 0.2",
        "m.config.width = 8",
        "m.parser['model']['depth'] = '3'",
    ],
)
def test_the_content_of_objects_counts_once_two_processes_have_traced(
    change: str, module: types.ModuleType
) -> None:
    """Until then, nothing says whether they hold what differs between all processes."""
    text = """
import argparse, configparser, dataclasses
options = {"depth": 2, "act": ["relu"]}
space = argparse.Namespace(inner=argparse.Namespace(rate=0.1))
config = dataclasses.make_dataclass("Config", [("width", int)])(4)
parser = configparser.ConfigParser()
parser.read_string("[model]\\ndepth = 2")
"""
    exec(text, vars(module))
    program = Program()
    before = program.facts()
    assert program.facts() == before
    exec(change, {"m": module})
    name = change.removeprefix("m.").partition(".")[0].partition("[")[0]
    expected = f"content of {name} in settings_of_job has changed"
    assert difference(program.facts(), [before, before]) == expected
    assert difference(program.facts(), [before]) == ""
    assert difference(before, [before, program.facts()]) == ""


def test_a_source_counts_even_if_processes_differ_in_it(module: types.ModuleType) -> None:
    edited = {**facts(), "source of settings_of_job": b"other"}
    assert difference(facts(), [edited]) == "source of settings_of_job has changed"
    assert difference(facts(), [edited, {**edited, "source of settings_of_job": b"third"}])
    assert difference(facts(), [edited, facts()]) == ""


@pytest.mark.parametrize("name", [f"c{'a2' * 25}b.kernel", "pyexpat.errors_of_job"])
def test_what_compilers_and_parts_in_c_add_does_not_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts()
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    assert facts() == before
    if name.endswith(".kernel"):  # torch's directory may be in that of the program
        module.__file__ = os.path.join(sys.path[-1], "kernel.main.so")
        assert facts() == before


def test_values_in_which_restarts_differed_do_not_count() -> None:
    """Such as a time or the name of a run; but they do as long as one process has run."""
    first: Facts = {"source of train": b"1", "RUN of train": b"1", "WIDTH of train": b"4"}
    second, third = {**first, "RUN of train": b"2"}, {**first, "RUN of train": b"3"}
    assert difference(third, [first]) == "RUN of train has changed"
    assert difference(third, [first, second]) == ""
    assert difference({**third, "WIDTH of train": b"5"}, [first, second]) != ""


def test_a_module_without_its_file_counts_once_it_differed() -> None:
    """A module that is loaded late is no other program if recorded processes differed in it."""
    without: Facts = {"source of train": b"1"}
    loaded = {**without, "source of plots": b"2", "names of plots": b"3"}
    assert difference(loaded, [without]) == "module plots is new"
    assert difference(without, [loaded, without]) == ""


def test_a_file_that_changed_after_the_process_began_is_like_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "edited_of_job.py"
    path.write_text("")
    time.sleep(0.01)
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited_of_job  # type: ignore[import-not-found]  # noqa: F401

    try:
        here = facts()["source of edited_of_job"]
        os.utime(path, (0, 0))  # the same text, but from before the process began
        assert facts()["source of edited_of_job"] != here
    finally:
        del sys.modules["edited_of_job"]


def test_a_module_that_is_loaded_again_is_read_again(module: types.ModuleType) -> None:
    program = Program()
    before = program.facts()
    assert module.__file__ is not None
    path = Path(module.__file__)
    path.write_text(path.read_text() + "# edited\n")
    os.utime(path, (1, 1))
    importlib.reload(module)
    assert difference(program.facts(), [before]) == "source of settings_of_job has changed"


def test_installed_distributions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts()
    (tmp_path / "flash_attn-2.5.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert difference(facts(), [before]) == "distribution flash_attn is new"


def test_the_files_of_a_library_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its distribution lists, and a file that was edited after it was installed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def facts_with(text: str, listed: str, site: str) -> dict[str, bytes]:
        packages = tmp_path / site / "site-packages"
        path = packages / "kit_of_job" / "__init__.py"
        record = packages / "kit_of_job-1.0.dist-info" / "RECORD"
        path.parent.mkdir(parents=True)
        record.parent.mkdir()
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(listed.encode()).digest()).decode()
        record.write_text(f"kit_of_job/__init__.py,sha256={digest.rstrip('=')},{len(listed)}\n")
        os.utime(path, (0, 0) if text == listed else (1, 1))
        os.utime(record, (0, 0))
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(packages))
            importlib.import_module("kit_of_job")
            found = facts()
            del sys.modules["kit_of_job"]
        return found

    before = facts_with("SCALE = 1\n", "SCALE = 1\n", "first")
    assert difference(facts_with("SCALE = 1\n", "SCALE = 1\n", "same"), [before]) == ""
    other = facts_with("SCALE = 2\n", "SCALE = 2\n", "other")
    assert difference(other, [before]) == "files of kit_of_job has changed"
    edited = facts_with("SCALE = 2\n", "SCALE = 1\n", "edited")
    assert difference(edited, [before]) == "files of kit_of_job has changed"
    assert difference(facts(), [before]) == "distribution kit_of_job is missing"
    assert difference(before, [edited, before, other]) == ""


@nightly
def test_looking_again_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 modules are looked at in 30 ms of processor time, with their files in the page cache."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"part_{number}_of_job" for number in range(500)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("WIDTH = 1\n" + "def f(x):\n    return x\n" * 60)
        os.utime(tmp_path / f"{name}.py", (0, 0))
    try:
        for name in names:
            __import__(name)
        program, times = Program(), []
        for _ in range(5):
            began = time.process_time()
            program.facts()
            times.append(time.process_time() - began)
        assert min(times) < 0.03
    finally:
        for name in names:
            sys.modules.pop(name, None)
