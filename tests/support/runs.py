"""Records of runs: written to a local tier, or as they are read from several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from s3cache.entries import first_name
from s3cache.records import Event, Record, Recorder, RecordLimits, Run
from tests.support.waiting import LONG_S

HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m"
BEGAN = 1_790_000_000.0


def record(root: Path, *records: Record | Event, **limits: int) -> str:
    """Write records of one process to a local tier; return the name of the run."""
    root.mkdir(mode=0o700, exist_ok=True)
    recorder = Recorder(str(root), RecordLimits(**limits))
    for each in records:
        recorder.add(each)
    recorder.close(LONG_S)
    return recorder.run


def two_ranks() -> list[Run]:
    """Return a rank that compiled and one that hit, with everything that a page shows."""
    unsafe = {
        "code": "custom-operator",
        "message": "mine.op has no formula",
        "line": "train.py:7: op(x)",
    }
    first = [
        _record(1.0, "miss", "absent", elapsed_s=0.2, where=("/job/train.py", 3, "step")),
        _record(2.5, "bypass", "custom-operator", reasons=(unsafe,)),
        _record(4.0, "miss", "guard", kind="fx"),
    ]
    second = [
        _record(3.0, "hit", "remote", elapsed_s=0.4, saved_s=75.0, where=("train.py", 3, "step")),
        _record(3.6, "hit", "local", elapsed_s=0.001, saved_s=12.0),
    ]
    return [
        Run("20261123-120000-11-aa", tuple(first), "/job/train.py", BEGAN, "rank 0"),
        Run("20261123-120001-12-bb", tuple(second), "/job/train.py", BEGAN + 0.5, "rank 1", False),
    ]


def fetched() -> list[Run]:
    """Return a process that fetched three entries and used one of them."""
    keys = ["ab" * 32, "cd" * 32, "ef" * 32]
    events = [Event("download", BEGAN, 0.1, first_name(key), 1_000) for key in keys]
    lost = Event("download", BEGAN, 0.1, first_name("01" * 32), 0, "absent")
    return [Run("r", (_record(1.0, "hit", "local"),), events=(*events, lost))]


def recalling() -> list[Run]:
    """Return a process that recalled two frames, traced one and refused one."""
    ends = ("recalled", "recalled", "traced", "refused: object")
    frames = [
        Event("recall", BEGAN + 9, 0.5, f"f{i} x.py:{i}", ended=e) for i, e in enumerate(ends)
    ]
    return [Run("r", (_record(1.0, "hit", "local"),), events=tuple(frames))]


def hostile() -> list[Run]:
    """Return runs with texts that would run as a script in a page that does not escape them."""
    record = _record(
        1.0,
        HOSTILE,
        HOSTILE,
        key=HOSTILE,
        where=(HOSTILE, 1, HOSTILE),
        kind=HOSTILE,
        reasons=({"message": HOSTILE, "fix": HOSTILE, "line": HOSTILE},),
    )
    return [Run(HOSTILE, (record,), HOSTILE, BEGAN, HOSTILE), Run(HOSTILE, (record,))]


def _record(at: float, outcome: str, reason: str, **more: Any) -> Record:
    usual: dict[str, Any] = {"kind": "aot", "key": "ab" * 32, "elapsed_s": 0.01}
    return Record(**{**usual, **more}, outcome=outcome, reason=reason, time=BEGAN + at)
