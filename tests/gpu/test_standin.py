"""The stand-in for a GPU is available."""

from __future__ import annotations

import os

import pytest

from tests.support.gpu import standin


@pytest.mark.skipif("CI" not in os.environ, reason="only CI has to have a stand-in")
def test_ci_skips_no_test_of_the_stand_in() -> None:
    assert standin.MISSING in ("", standin.WITH_CUDA)
