"""A subscriber that fails is off alone; the others, and the program, go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from s3cache.errors import MissError
from s3cache.seam import Feature, Notice, Question, Span


def fails(*_: object) -> Any:
    raise RuntimeError("of the feature")


@contextlib.contextmanager
def fails_to_begin() -> Iterator[None]:
    fails()
    yield


def test_a_subscriber_that_fails_is_called_once(caplog: pytest.LogCaptureFixture) -> None:
    notice: Notice[[int]] = Notice()
    seen: list[int] = []
    notice.subscribe(fails)
    notice.subscribe(seen.append)
    notice.tell(1)
    notice.tell(2)
    assert seen == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "tests.test_seam.fails failed and is off: of the feature"
    ]


def test_the_first_answer_counts() -> None:
    question: Question[[], str] = Question()
    assert not question
    assert question.ask() is None
    question.subscribe(lambda: None)
    question.subscribe(fails)
    end = question.subscribe(lambda: "one")
    question.subscribe(lambda: "two")
    assert question.ask() == "one"
    assert [*question.ask_all()] == ["one", "two"]
    end()
    assert question.ask() == "two"


def test_an_answer_that_raises_the_error_of_a_miss_reaches_the_program() -> None:
    question: Question[[], str] = Question()
    question.subscribe(Mock(side_effect=MissError("on_miss is error")))
    with pytest.raises(MissError):
        question.ask()
    assert question


def test_the_block_of_a_span_runs_whatever_the_contexts_do() -> None:
    span: Span[[]] = Span()
    steps: list[str] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        steps.append("begin")
        yield
        steps.append("end")

    for function in (fails, fails_to_begin, noted):
        span.subscribe(function)
    for _ in range(2):
        with span.around():
            steps.append("block")
    assert steps == ["begin", "block", "end"] * 2


def test_errors_of_the_program_pass_and_strict_mode_raises_those_of_features() -> None:
    span: Span[[]] = Span()
    span.subscribe(contextlib.nullcontext)
    with pytest.raises(KeyError), span.around():
        raise KeyError("of the program")
    notice: Notice[[]] = Notice(strict=True)
    notice.subscribe(fails)
    with pytest.raises(RuntimeError):
        notice.tell()


def test_a_feature_that_cannot_begin_is_off(caplog: pytest.LogCaptureFixture) -> None:
    feature = Feature(name="x", does="doing x")
    assert feature.call("") is None
    assert feature.call(f"{__name__}:fails") is None
    assert caplog.messages == ["doing x is off: of the feature"]
    with pytest.raises(RuntimeError):
        feature.call(f"{__name__}:fails", strict=True)
