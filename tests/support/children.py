"""Do work in forks of a process that has imported torch: each costs almost nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any


def in_child(work: Callable[[], Any], timeout_s: float, log: str) -> tuple[Any, str]:
    """Return what ``work`` returns in a fork of this process, and the error if it does not.

    Args:
        work: returns a JSON value. What it changes in the process ends with the process.
        log: the file for what it writes to stderr.
    """
    forks = multiprocessing.get_context("fork")
    answer, theirs = forks.Pipe(duplex=False)
    child = forks.Process(target=_answer, args=(work, log, theirs))
    child.start()
    theirs.close()
    try:
        if not answer.poll(timeout_s):
            return None, f"did not answer within {timeout_s} s"
        result, error = json.loads(answer.recv_bytes())
        return result, error
    except (EOFError, OSError, ValueError):
        return None, "its process died"
    finally:
        child.kill()
        child.join()
        answer.close()


def _answer(work: Callable[[], Any], log: str, pipe: Any) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        pipe.send_bytes(json.dumps([work(), ""]).encode())
    except BaseException:
        traceback.print_exc()
        pipe.send_bytes(json.dumps([None, traceback.format_exc(limit=-4)[-900:]]).encode())
    os._exit(0)
