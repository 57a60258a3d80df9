"""torch's internals are where they are declared to be, and are read there each time."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from s3cache.torch_api import bind_declarations, declarations, internals, survey
from tests.support.machines import Machine
from tests.support.waiting import LONG_S

# Some builds tell torch.__version__ more than their metadata: 2.13.0+cu130.
VERSION = version("torch")


def test_the_installed_torch_is_as_declared() -> None:
    """``make test-torch TORCH=x`` prints the same as a table, for that torch."""
    lacks = [row.name for row in survey() if row.expected and not row.present]
    has = [row.name for row in survey() if row.present and not row.expected]
    assert lacks == [], "declare until which release they are there, and what takes their place"
    assert has == [], "declare since which release they are there"


def test_all_declarations_bind_to_it() -> None:
    bind_declarations()


def test_what_is_declared_holds_for_some_supported_release() -> None:
    releases = [(2, minor) for minor in range(internals.OLDEST[1], internals.NEWEST[1] + 1)]
    for declaration in declarations():
        assert any(map(declaration.holds_for, releases)), declaration.place


def test_every_mistake_in_a_declaration_is_seen(tmp_path: Path) -> None:
    told = Machine(tmp_path).run("tests.torch_api.declaring:table_of_mistakes").result
    said = [line.split(maxsplit=2) for line in told["lines"]]
    places = "torch._guards:Guard"
    assert [(words[0], words[2]) for words in said[:-1]] == [
        ("MISSING", "torch:nonsense"),
        ("MISSING", "torch.nonsense:compile"),
        ("UNEXPECTED", "torch:compile"),
        ("there", "torch:compile"),
        ("absent", "torch:nonsense"),
        ("there", f"{places} .source"),
        ("MISSING", f"{places} .nonsense"),
        ("absent", f"{places} .later"),
        ("there", f"{places} .source"),
        ("MISSING", f"{places} .target"),
        ("there", "torch._guards:TracingContext.try_get 'tracing_context'"),
        ("MISSING", "torch._guards:TracingContext.try_get 'nonsense'"),
        ("MISSING", "torch:compile makes tea"),
    ]
    assert told["lines"][-1].endswith(" 7 not as declared")
    assert told["status"] == 1


def test_the_table_is_printed_and_tells_a_good_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "s3cache.torch_api"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    *lines, last = done.stdout.splitlines()
    assert len(lines) == len(survey())
    assert last == f"torch {VERSION}, supported: {len(lines)} names, 0 not as declared"


def test_what_this_torch_lacks_is_named(tmp_path: Path) -> None:
    told = Machine(tmp_path).run("tests.torch_api.declaring:absent_names").result
    assert told["find"] is None
    assert "torch:compile is of torch" in told["later"]
    assert "instead: patience" in told["later"]
    for name in ("missing", "found", "all"):
        assert told[name] == f"torch {VERSION} lacks torch:nonsense"


def test_a_name_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = internals.functorch_config.get()
    before = internals.current_tracing_context.get()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert config.enable_autograd_cache is False
    owner, name = internals.current_tracing_context.owner()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, staticmethod(lambda: None))
        assert internals.current_tracing_context.get() is not before
    assert internals.current_tracing_context.get() is before
