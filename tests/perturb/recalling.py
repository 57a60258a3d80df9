"""Run changed programs on the recalled frames of their base: none may get a wrong answer.

    python -m tests.perturb.recalling [--each N] [FAMILY ...]

Each base program is compiled and saved once. A changed program then runs with recall on, and Dynamo
must not trace: a recalled frame must do the same as eager mode, anything else is a miss.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import torch

import s3cache
from tests.perturb.changes import all_bases, all_changes
from tests.perturb.judge import Verdicts
from tests.perturb.program import Change, Program, compiled, difference, eager


class _NotRecalledError(Exception):
    """Dynamo would trace a frame."""


@functools.wraps(torch._dynamo.convert_frame._compile)  # hooks inspect its arguments
def _trace_nothing(*_: Any, **__: Any) -> NoReturn:
    raise _NotRecalledError


def judge_recall(
    bases: Mapping[str, Program], changes: Iterable[Change]
) -> tuple[Verdicts, Counter[str]]:
    """Return the verdict on each change, and why bases cannot be recalled."""
    verdicts, refused = Verdicts(), Counter[str]()
    shelf: dict[str, str] = {}
    for change in changes:
        if change.base not in shelf:
            shelf[change.base] = _kept(bases[change.base], refused)
        if not shelf[change.base]:
            continue
        try:
            expected = eager(change.program)
        except Exception as exc:
            verdicts.add(change, "broken", "".join(traceback.format_exception_only(exc))[:300])
            continue
        try:
            # Hooks wrap the functions that are present when they are installed.
            with (
                patch.object(torch._dynamo.convert_frame, "_compile", _trace_nothing),
                s3cache.enabled(local_dir=shelf[change.base], recall="on", mode="read-only"),
            ):
                found = compiled(change.program)
        except Exception as exc:
            is_miss = isinstance(exc, _NotRecalledError) or "_NotRecalledError" in repr(exc)
            missed = "lost" if change.same else "miss"
            text = "".join(traceback.format_exception_only(exc))[:300]
            verdicts.add(change, missed if is_miss else "broken", text)
            continue
        why = difference(found, expected)
        verdicts.add(change, "wrong" if why else "right", why or "")
    return verdicts, refused


def _kept(base: Program, refused: Counter[str]) -> str:
    """Return a local tier with all frames of a program, or ``""`` if one cannot be recalled."""
    directory = tempfile.mkdtemp(prefix="s3cache-recall-")
    with s3cache.enabled(local_dir=directory, recall="on") as cache:
        compiled(base)
        counts = cache.stats().features["recall"]
    refused.update({name: int(n) for name, n in counts.items() if name.startswith("refused:")})
    return directory if counts["saved"] and not counts["refused"] else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the changes and print the verdicts; return 1 if any answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.perturb.recalling", description=__doc__)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--each", type=int, default=1, help="judge only each n-th")
    options = parser.parse_args(arguments)
    changes = [
        each for each in all_changes() if not options.families or each.family in options.families
    ]
    changes.sort(key=lambda each: each.base)
    verdicts, refused = judge_recall(all_bases(), changes[:: options.each])
    for family, counts in sorted(verdicts.counts.items()):
        print(f"{family:12}", *(f"{name} {count}" for name, count in sorted(counts.items())))
    for name in ("broken", "lost", "wrong"):
        for each in getattr(verdicts, name):
            print(f"{name}: {each}")
    print(f"{verdicts.judged} changes judged; bases refused: {dict(refused)}")
    return int(bool(verdicts.wrong))


if __name__ == "__main__":
    sys.exit(main())
