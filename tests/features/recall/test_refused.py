"""A frame that asks what no other process can ask again is traced; marks on functions are compared.

The programs of the table judge answers. These are questions with an answer that differs between
processes by chance, such as an address, or that changes how Dynamo compiles and not the result.
"""

from __future__ import annotations

import collections
import enum
import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.comptime import comptime

import s3cache
from s3cache.features.recall import dynamo
from s3cache.features.recall.content import ContentDescriber
from tests.support.machines import Machine

GENERATOR = random.Random(1)
NAMES = ["a", "b"]
TEXT = "-".join(NAMES)
SAME = "-".join(NAMES)


class Kind(enum.Enum):
    """An enum with a member."""

    ONE = 1


def _helper(x: Any) -> Any:
    return x


def _comptime(x: Any) -> Any:
    @comptime
    def _(context: Any) -> None:
        assert NAMES

    return x + 1


def _in_options(x: Any) -> Any:
    with OPTIONS_OF_DYNAMO:
        return x + 1


OPTIONS_OF_DYNAMO = torch._dynamo.error_on_graph_break(True)
_HASH = "__ha" + "sh__"

FRAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "address of a function": ("object", lambda x: x + len(str(_helper))),
    "repr of a function": ("object", lambda x: x + len(repr(_helper))),
    "path of a module": ("object", lambda x: x + len(str(random))),
    "state of a generator": ("random", lambda x: x + GENERATOR.getstate()[1][0] % 7),
    "comptime": ("code", _comptime),
    "options of Dynamo": ("object", _in_options),
    "order of a set": ("object", lambda x: x + len(next(iter({"a"}.union(NAMES))))),
    "hash of a string": ("source", lambda x: x + "recall".__hash__() % 2),
    "hash by a computed name": ("source", lambda x: x + getattr(Kind.ONE, _HASH)() % 2),
    "identity of strings": ("object", lambda x: x + (1 if TEXT is SAME else 2)),
}


def compile_all() -> dict[str, dict[str, int]]:
    """Compile each frame; return what recall counted."""
    found = {}
    for name, (_, frame) in {**FRAMES, "none": ("", _plain)}.items():
        torch.compiler.reset()
        with s3cache.enabled(local_dir=tempfile.mkdtemp(), recall="on") as cache:
            torch.compile(frame)(torch.ones(4))
            found[name] = {each: int(n) for each, n in cache.stats().features["recall"].items()}
    return found


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    found: dict[str, dict[str, int]] = machine.run(f"{__name__}:compile_all", server=0).result
    return found


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_depends_on_chance_is_not_saved(
    name: str, counts: dict[str, dict[str, int]]
) -> None:
    assert counts[name].get(f"refused:{FRAMES[name][0]}", 0) >= 1, counts[name]
    assert counts[name]["saved"] == 0
    assert counts["none"]["saved"] == 1


def _plain(x: Any) -> Any:
    return x + 1


def _decorated(mode: int) -> Any:
    return torch.inference_mode(bool(mode))(_plain)


def _region(entries: int) -> Any:
    def region(x: Any) -> Any:
        return x.sin()

    vars(region)["__marked_compile_region_max_reuse_entries__"] = entries
    return region


@pytest.mark.parametrize("make", [_decorated, _region, functools.partial(collections.deque, [1])])
def test_the_text_of_an_object_has_what_dynamo_reads_without_a_source(
    make: Callable[[Any], Any],
) -> None:
    some, others, again = (ContentDescriber().of(make(number)) for number in (0, 1, 0))
    assert some != others
    assert some == again


def test_the_text_of_a_function_says_how_dynamo_treats_it() -> None:
    def function(x: Any) -> Any:
        return x

    before = ContentDescriber().of(function)
    torch.compiler.allow_in_graph(function)
    allowed = ContentDescriber().of(function)
    torch._dynamo.disallow_in_graph(function)
    assert len({before, allowed, ContentDescriber().of(function)}) == 3


@pytest.fixture
def tensorify() -> Iterator[Callable[[], None]]:
    clear = torch._dynamo.utils._is_tensorify_enabled.cache_clear
    yield clear
    clear()


def test_the_key_has_what_torch_reads_once(
    tensorify: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = set()
    for value in ("0", "1"):
        monkeypatch.setenv("TENSORIFY_PYTHON_SCALARS", value)
        tensorify()
        texts.add(dynamo.options_of_dynamo())
    assert len(texts) == 2


def test_the_key_has_whether_cudnn_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dynamo.accelerators()
    monkeypatch.setattr(torch.backends.cudnn, "enabled", not torch.backends.cudnn.enabled)
    assert dynamo.accelerators() != before
