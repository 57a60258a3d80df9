"""The demos' processes end with them, whenever they are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import psutil
import pytest

from examples import _stage


def test_an_interrupt_while_a_process_is_started_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    started = []

    def interrupted(popen: Any, *args: Any) -> None:
        start(popen, *args)
        started.append(psutil.Process(popen.pid))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        _stage.process("http.server", "0", env=os.environ, stderr=subprocess.DEVNULL),
    ):
        pytest.fail("the interrupt came to nothing")
    [process] = started
    assert not process.is_running()
