"""Code is identified by a uuid, by a registered version, or by distribution and file."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode

from s3cache.graph._describe import UnidentifiedError, code_fingerprint, identity, rough_identity
from s3cache.graph._origin import origin_of

Install = Callable[..., types.ModuleType]

LIBRARY = """
import functools
STATE = []
def plain(x): return x
def of(by):
    def inner(x): return x * by
    return inner
class Callable:
    def __init__(self, by): self.by = by
    def __call__(self, x): return x * self.by
    def method(self, x): return x
def counts(function):
    count = 0
    @functools.wraps(function)
    def inner(*args):
        nonlocal count
        count += 1
        return function(*args)
    return inner
"""


class Pass(CustomGraphPass):
    def __init__(self, name: Any) -> None:
        self.name = name

    def __call__(self, graph: Any) -> None: ...

    def uuid(self) -> Any:
        return self.name


def mine(x: Any) -> Any:
    return x


def test_passes_and_registered_code_are_identified_by_what_they_say() -> None:
    assert identity(Pass("1")) == identity(Pass("1")) != identity(Pass("2"))
    for name in (None, "", object()):
        with pytest.raises(UnidentifiedError):
            identity(Pass(name))
    assert identity(mine, lambda each: "7" if each is mine else None) == "version 7"


def test_a_library_is_identified_by_distribution_version_and_source(install: Install) -> None:
    modules = [install(LIBRARY), install(LIBRARY + "\n# edited\n"), install(LIBRARY, version="2.0")]
    texts = [identity(each.plain) for each in modules]
    assert len({text.split(" ", 1)[1] for text in texts}) == 3
    assert "s3cache_library_0 1.0" in texts[0]
    with pytest.raises(UnidentifiedError, match="no installed distribution"):
        identity(install(LIBRARY, recorded=False).plain)


def _with_attribute(part: functools.partial[Any], value: object) -> functools.partial[Any]:
    part.factor = value  # type: ignore[attr-defined]
    return part


def test_values_in_a_librarys_function_are_in_its_identity(install: Install) -> None:
    library: Any = install(LIBRARY)
    for make in (
        library.of,
        library.Callable,
        lambda by: functools.partial(library.plain, by),
        lambda by: functools.partial(library.plain, x=by),
        lambda by: _with_attribute(functools.partial(library.plain), by),
        lambda by: library.Callable(by).method,
        lambda by: [library.plain, {by}],
        lambda by: functools.lru_cache(library.of(by)),
        lambda by: staticmethod(library.of(by)),
        lambda by: property(library.of(by)),
    ):
        assert identity(make(1)) == identity(make(1)) != identity(make(2))


def test_what_a_fake_mode_has_counted_is_not_in_an_identity(install: Install) -> None:
    """A process that hits traces less than one that misses, with the same function."""
    library: Any = install(LIBRARY)
    mode = FakeTensorMode()
    before = identity(library.of(mode))
    with mode:
        mode.epoch += 1
        assert identity(library.of(mode)) == before
    assert identity(library.of(FakeTensorMode(allow_non_fake_inputs=True))) != before


def test_unidentified_code_has_only_a_rough_identity() -> None:
    values: list[Any] = [mine, functools.partial(mine), torch.no_grad()(mine), Pass]
    values += [types.ModuleType("mine"), Mock(), types.MethodType(F.relu, Mock()), torch.ones(1)]
    values += [lambda x: x, [[[[[[[[[[1]]]]]]]]]]]
    for value in values:
        with pytest.raises(UnidentifiedError):
            identity(value)
        assert isinstance(rough_identity(value), str)


def test_code_of_torch_and_python_has_an_identity() -> None:
    values: list[Any] = [F.relu, torch.sin, torch.Tensor.sin, torch.ops.aten.sin.default]
    values += [torch.nn.Linear, np.sin, operator.add, torch.float32, (1, 2.0, "three", None)]
    values += [functools.partial(F.relu, inplace=True)]
    assert all(map(identity, values))
    assert len({*map(identity, values)} | {identity([value]) for value in values}) == 20


def test_a_fingerprint_depends_on_the_code_and_not_on_its_file() -> None:
    def digest(source: str, file: str = "a.py") -> str:
        return code_fingerprint(compile(source, file, "exec"))

    assert digest("x = 1") == digest("x = 1", "b.py") != digest("x = 2")
    assert digest("x in {'a', 'b'}") != digest("x in {'a', 'c'}")
    assert digest("def f(x): return 1") != digest("def f(y): return 1")


def test_the_file_of_code_decides_its_origin() -> None:
    posed = type("Meta", (type,), {"__module__": property(id)})("Kind", (), {})
    values: dict[str, list[object]] = {
        "torch": [F.relu, torch.sin, torch.nn.Linear, torch.ops],
        "python": [math.sqrt, functools.wraps, dict],
        "library": [np.mean, np.ndarray, pytest.fixture],
        "user": [functools.wraps(F.relu)(mine), types.ModuleType("mine"), posed],
    }
    values["user"].append(type("Linear", (), {"__module__": "torch.nn"}))
    for kind, those in values.items():
        assert {origin_of(value).kind for value in those} == {kind}
