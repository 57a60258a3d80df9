"""Two minutes of it; ``make soak`` takes half an hour."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.soak.vitals import Vitals, growth
from tests.support.density import dense

pytestmark = pytest.mark.timeout(900)


@dense
def test_nothing_is_lost_or_wrong_or_grows() -> None:
    command = [sys.executable, "-m", "tests.soak", "--seconds", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| **lost** | 0 |" in done.stdout
    assert "| **wrong** | 0 |" in done.stdout


def test_what_grows_is_seen() -> None:
    steady = [Vitals(100, 10, 5, 30)] * 50
    assert all(each.is_flat for each in growth(steady))
    leaking = [Vitals(100 + number, 10, 5 + number, 30 + number) for number in range(50)]
    assert [each.what for each in growth(leaking) if not each.is_flat] == ["sockets", "descriptors"]
