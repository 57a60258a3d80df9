"""Whose code is it: decided by files, whatever names it bears; and what libraries answer for."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from s3cache.graph._code import UntoldError, fingerprint
from s3cache.graph._homes import home_of


def posing(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.nn.functional.relu, "torch"),
        (torch.sin, "torch"),
        (torch.nn.Linear, "torch"),
        (torch.ops, "torch"),
        (math.sqrt, "python"),
        (functools.wraps, "python"),
        (dict, "python"),
        (np.mean, "library"),
        (np.ndarray, "library"),
        (pytest.fixture, "library"),
        (functools.wraps(torch.nn.functional.relu)(posing), "user"),
        (type("Linear", (), {"__module__": "torch.nn"}), "user"),
        (types.ModuleType("mine"), "user"),
    ],
)
def test_whose_it_is(value: object, kind: str) -> None:
    assert home_of(value).kind == kind


Install = Callable[..., types.ModuleType]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a library of one module, whose source this is, in a directory of its own."""
    made: list[str] = []

    def install(source: str, record: str | None = None, digest: str = "1") -> types.ModuleType:
        name = f"s3cache_library_{len(made)}"
        site = tmp_path / str(len(made)) / "site-packages"
        package = site / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source, encoding="utf-8")
        described = site / f"{record or name}-1.0.dist-info"
        described.mkdir()
        line = f"{name}/__init__.py,sha256={digest},1\n"
        (described / "RECORD").write_text(line if record is None else "other/a.py,,\n", "utf-8")
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield install
    for name in made:
        del sys.modules[name]


ASKS = "import os\ndef f(x): return x * int(os.environ.get('S3CACHE_ASKED', {})) * len(os.sep)"


def test_a_library_answers_for_what_cannot_be_followed(install: Install) -> None:
    assert fingerprint(install(ASKS.format(1)).f)


def warns(x: Any) -> Any:
    if x is None:
        warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
    return x


def test_code_that_warns_is_followed() -> None:
    """``warnings.warn`` is in C; torchao's decompositions, in torch's own table, call it."""
    assert fingerprint(warns)


def test_what_is_not_recorded_as_installed_is_the_users(install: Install) -> None:
    with pytest.raises(UntoldError, match="environment"):
        fingerprint(install(ASKS.format(1), record="another").f)


def test_two_bodies_under_one_version_are_told_apart(install: Install) -> None:
    one, other = install(ASKS.format(1)).f, install(ASKS.format(2)).f
    assert fingerprint(one) != fingerprint(other)


def test_the_environment_that_a_library_names_matters(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = install(ASKS.format(1)).f
    before = fingerprint(function)
    monkeypatch.setenv("S3CACHE_ASKED_TOO", "1")
    assert fingerprint(function) == before
    monkeypatch.setenv("S3CACHE_ASKED", "1")
    assert fingerprint(function) != before


def test_what_users_put_into_a_library_is_theirs(install: Install) -> None:
    library: Any = install("def g(): return 1\ndef f(x): return x * g()")
    before = fingerprint(library.f)
    library.g = lambda: 2
    assert fingerprint(library.f) != before
    library.g = lambda: time.time()
    with pytest.raises(UntoldError, match="time"):
        fingerprint(library.f)


def test_what_users_put_into_torch_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        return torch.nn.functional.silu(x), torch.nn.Linear

    before = fingerprint(f)
    monkeypatch.setattr(torch.nn.functional, "silu", posing)
    patched = fingerprint(f)
    monkeypatch.setattr(torch.nn.Linear, "forward", posing)
    assert len({before, patched, fingerprint(f)}) == 3
