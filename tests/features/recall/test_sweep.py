"""No question with a changed answer is answered from the record of a frame."""

from __future__ import annotations

import pytest

from tests.support.marks import nightly
from tests.support.scripts import python


@pytest.mark.timeout(7200)  # for hangs
@pytest.mark.parametrize("kind", ["value", "process"])
@nightly
def test_no_changed_answer_is_recalled(kind: str) -> None:
    sweep = ("-m", "tests.features.recall.sweep", "--kind", kind)
    run = python("-W", "ignore", *sweep, timeout_s=7200)
    assert " 0 wrong, 0 failed; " in run.stdout
