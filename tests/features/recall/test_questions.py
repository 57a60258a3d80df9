"""Questions that Dynamo asked the process are asked again, and their answers compared."""

from __future__ import annotations

import abc
import builtins
import collections
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import MutableSequence, Sequence
from pathlib import Path

import pytest
import torch

from s3cache.features.recall.candidate import Candidate
from s3cache.features.recall.content import ContentDescriber
from s3cache.features.recall.questions import Question, changed, question_rows
from s3cache.features.recall.sources import RefusedError, Sources


class Listed:
    """A class that a test registers."""


def _rows(kind: str, *about: object) -> list[object]:
    question = Question(kind, tuple((each, None) for each in about))
    return question_rows([question] * 2, Sources({}, {}), vars(builtins))


def _changed(rows: list[object]) -> str:
    return changed(rows, Sources({}, {}), vars(builtins))


def test_a_function_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = _rows("call", importlib.util.find_spec, (), "recall_later")
    assert (len(rows), _changed(rows)) == (1, "")
    (tmp_path / "recall_later.py").touch()
    importlib.invalidate_caches()
    assert _changed(rows) == "call importlib.util find_spec recall_later"


def test_a_function_of_torch_is_asked_again() -> None:
    rows = _rows("call", torch.get_autocast_dtype, (), "cpu")
    assert _changed(rows) == ""
    before = torch.get_autocast_dtype("cpu")
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        assert _changed(rows) != ""
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_a_module_may_get_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recall_lib", lib := types.ModuleType("recall_lib"))
    rows = _rows("attribute", lib, "flash")
    assert _changed(rows) == ""
    lib.__dict__["flash"] = True
    assert _changed(rows) == "attribute recall_lib flash"


def test_a_class_may_be_registered() -> None:
    """A subclass of the abstract class has the registry."""
    rows = _rows("subclass", Listed, Sequence)
    assert _changed(rows) == ""
    MutableSequence.register(Listed)
    assert _changed(rows).startswith("subclass ")


def test_builtins_may_get_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows("builtin", "recall_constant")
    assert _changed(rows) == ""
    monkeypatch.setattr(builtins, "recall_constant", 1, raising=False)
    assert _changed(rows) == "builtin recall_constant"


def test_a_question_that_cannot_be_asked_again_refuses_the_frame() -> None:
    class Local(abc.ABC):  # noqa: B024 - it only has a registry
        """A class without a name in its module."""

    with pytest.raises(RefusedError, match="neither a name nor a source"):
        _rows("subclass", Listed, Local)


def test_attributes_that_c_gives_to_an_object_are_in_its_text() -> None:
    class OwnError(Exception):
        """Has its arguments in C."""

    class Queue(collections.deque[int]):
        """Has its maximum in C."""

    for make in (lambda n: collections.deque([1], n), lambda n: Queue([1], n), OwnError):
        some, same, other = (ContentDescriber().of(make(n)) for n in (2, 2, 3))
        assert some == same != other


# -- the names of environment variables by which frames are compared

HERE = {b"HOME": b"/root", b"ACT": b"relu"}


def test_variables_of_torch_and_s3cache_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {b"TORCHINDUCTOR_CACHE_DIR": b"x", b"S3CACHE_JOB": b"y", b"TRITON_CACHE_DIR": b"z"}
    texts = []
    for table in (HERE, {**added, **HERE}, {**HERE, b"K": b"1"}):
        monkeypatch.setattr(os.environ, "_data", table)
        texts.append(ContentDescriber().by_single_keys(table))
    assert texts[0] == texts[1] != texts[2]


def test_all_names_are_compared_if_a_guard_reads_all_keys() -> None:
    single = [["TYPE_MATCH", 3, [], {}, None], ["DICT_CONTAINS", 3, ["K"], {}, True]]
    assert 3 not in Candidate(guards=single).read_as_a_whole()
    assert 3 in Candidate(guards=[*single, ["DICT_KEYS_MATCH", 3, [], {}, None]]).read_as_a_whole()
    assert 3 in Candidate(guards=single, key_order=[3]).read_as_a_whole()
