"""Ask one question in a frame, and change its answer: the frame must not be recalled.

    python -m tests.features.recall.sweep [--jobs 2] [--each 1] [WORD ...]

The questions come from generators that know nothing of Dynamo or of recall: every public attribute,
method and operator of values of Python's and torch's own types, and every function without
arguments, and every plain constant, of modules in states of the process. A question is kept if its
answer differs between two variants of a value or of the process. Its frame is

    x + 1 if QUESTION == ANSWER else x + 2

with the answer in variant A, so all frames share two graphs, and one process runs many of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import re
import signal
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import s3cache
from s3cache.features.recall.agreement import Agreement
from s3cache.features.recall.program import Program
from tests.features.recall.serving import prepare_forks
from tests.support import compiled
from tests.support.children import in_child
from tests.support.modules import execute

_TABLE = Path(__file__).with_name("sweep.txt")
_IN_A_PROCESS = 40
_TIMEOUT_S = 400
_IMPORTS = """\
import abc, array, collections, contextlib, copy, dataclasses, datetime, decimal, enum, fractions
import functools, gc, importlib, importlib.metadata, importlib.util, inspect, itertools, locale
import logging, math, multiprocessing, numbers, operator, os, pathlib, platform, random, re
import socket, string, sys, tempfile, threading, time, types, typing, uuid, warnings, weakref
import numpy as np, torch, torch.distributed, torch.nn as nn
"""


@dataclass(frozen=True)
class Question:
    """An expression with another answer in each variant.

    Attributes:
        kind: ``value`` or ``process``.
        setup: makes the variant: an expression of ``V`` (0, then 1) with the value, which is called
            ``T``, or a statement that changes the process, for variant B.
        asks: the expression.
        answer: its answer in variant A, as Python.
    """

    kind: str
    setup: str
    asks: str
    answer: str

    @property
    def name(self) -> str:
        """What is asked, and in which change."""
        return f"{self.asks} [{self.setup}]"


@dataclass
class Verdicts:
    """The verdicts on questions.

    Attributes:
        asked: the number of questions.
        recalled: frames that were recalled when nothing had changed.
        seen: questions of which the second rule, which is off here, sees the change.
        wrong: frames with another answer than in eager mode, where torch alone has the right one.
        failed: errors of processes.
        refused: reasons for which frames were not saved, with numbers.
    """

    asked: int = 0
    recalled: int = 0
    seen: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


# -- generators


def _rows(part: str) -> list[str]:
    """Return the lines of a part of the table."""
    parts = _TABLE.read_text(encoding="utf-8").split("\n#: ")
    text = next(text for text in parts if text.startswith(part + "\n"))
    rows = text.splitlines()[1:]
    return [row for row in rows if row and not row.startswith("# ")]


def _space() -> dict[str, Any]:
    module = sys.modules["swept"] = types.ModuleType("swept")  # dataclasses look it up
    space = vars(module)
    exec(_IMPORTS, space)
    exec("\n".join(_rows("classes")), space)
    return space


def questions_of_value(setup: str) -> Iterator[Question]:
    """Yield the questions about a value with another answer in each variant of it."""
    space, arguments = _space(), _rows("arguments")

    def value(variant: int) -> Any:
        return eval(setup, {**space, "V": variant})

    forms = [[asks] for asks in _rows("questions about T")]
    for name in dir(value(0)):
        if not name.startswith("_"):
            forms.append([f"T.{name}", *(f"T.{name}({some})" for some in arguments)])
    for form in forms:
        for asks in form:
            answers = [_answer(asks, {**space, "T": value(variant)}) for variant in (0, 1)]
            if all(answers) and answers[0] != answers[1]:
                yield Question("value", setup, asks, answers[0])
                break


def questions_of_process(change: str) -> Iterator[Question]:
    """Yield the questions about this process that ``change`` answers in another way; it is made."""
    space, asked = _space(), _rows("questions about the process")
    unsafe = _rows("functions that end, block or slow down the process")
    for module in _rows("modules"):
        for name, value in sorted(vars(eval(module, space)).items()):
            if name.startswith("_") or isinstance(value, (type, types.ModuleType)):
                continue
            if not callable(value):
                asked.append(f"{module}.{name}")
            elif name not in unsafe:
                asked.append(f"{module}.{name}()")
    before = {asks: _answer(asks, space) for asks in asked}
    # Leave out questions with another answer at each call.
    asked = [asks for asks in asked if before[asks] and before[asks] == _answer(asks, space)]
    exec(change, space)
    for asks in asked:
        after = _answer(asks, space)
        if after and after != before[asks]:
            yield Question("process", change, asks, before[asks])


def _answer(asks: str, space: dict[str, Any]) -> str:
    """Return the answer as Python; ``""`` if it has none that is plain."""

    def alarm(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = eval(asks, space)
        text = repr(answer) if _is_plain(answer) else ""
    except BaseException:
        return ""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return text if len(text) < 500 else ""


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in (tuple, list) and depth < 2:
        return all(_is_plain(part, depth + 1) for part in value)
    if type(value) in (int, float, complex) and not math.isfinite(abs(value)):
        return False
    return type(value) in (bool, int, float, complex, str, bytes, type(None))


# -- processes


def _module(folder: Path, questions: Sequence[Question], variant: int) -> types.ModuleType:
    """Write the frames of questions to a file, the same for both variants, and execute it."""
    lines = [_IMPORTS, *_rows("classes")]
    for number, question in enumerate(questions):
        asks = question.asks
        if question.kind == "value":
            lines.append(f"T{number} = {question.setup}")
            asks = re.sub(r"\bT\b(?!')", f"T{number}", asks)
        lines.append(
            f"def f{number}(x): return x + 1 if ({asks}) == ({question.answer}) else x + 2"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "swept.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.utime(path, (0, 0))  # the second rule distrusts files that are newer than the process
    module = execute(path, V=variant)
    if variant and questions[0].kind == "process":
        exec(questions[0].setup, vars(module))
    return module


def _play(folder: Path, url: str, questions: Sequence[Question], variant: int, how: str) -> Any:
    """Run the frames; return for each its answer and whether it was recalled, and the facts."""
    warnings.simplefilter("ignore")
    x = torch.zeros(4, dtype=torch.float32)
    rows: list[Any] = []
    with contextlib.ExitStack() as stack:
        if how != "eager":
            os.environ["S3CACHE_RECALL"] = how
            local = stack.enter_context(tempfile.TemporaryDirectory())
            mode: Any = "read-write" if variant == 0 else "read-only"
            cache = stack.enter_context(s3cache.enabled(url, local_dir=local, mode=mode))
        module = _module(folder, questions, variant)
        for number in range(len(questions)):
            f = getattr(module, f"f{number}")
            before = _recalled(cache) if how != "eager" else 0
            try:
                got = (f if how == "eager" else torch.compile(f))(x)
                rows.append([float(got[0]), (_recalled(cache) if how != "eager" else 0) - before])
            except Exception as exc:
                rows.append([f"{type(exc).__name__}: {exc}"[:200], 0])
        facts = {label: fact.hex() for label, fact in Program().facts().items()}
        refused: dict[str, int] = {}
        if how != "eager":
            assert not cache.flush(60).remaining
            counts = cache.stats().features["recall"]
            refused = {code: int(n) for code, n in counts.items() if code.startswith("refused:")}
    return {"rows": rows, "facts": facts, "refused": refused}


def _recalled(cache: Any) -> int:
    return int(cache.stats().features["recall"].get("recalled", 0))


def judge(questions: Sequence[Question], folder: Path, url: str) -> Verdicts:
    """Judge the frames of some questions: a process runs all of them in one variant."""
    verdicts = Verdicts(len(questions))
    runs: dict[tuple[int, str], Any] = {}
    for variant, how in ((0, "on"), (0, "again"), (1, "eager"), (1, "on"), (1, "off")):
        work = partial(_play, folder, url, questions, variant, how.replace("again", "on"))
        if how != "off" or _wrong(runs, questions):
            runs[variant, how], error = in_child(work, _TIMEOUT_S, f"{folder}.log")
            if error:
                verdicts.failed.append(f"{how} {variant} of {questions[0].name}: {error[-300:]}")
                return verdicts
    verdicts.recalled = sum(is_recalled for _, is_recalled in runs[0, "again"]["rows"])
    verdicts.refused.update(runs[0, "again"]["refused"])
    before, after = runs[0, "again"]["facts"], runs[1, "on"]["facts"]
    labels = {
        label
        for label in {*before, *after}
        if before.get(label) != after.get(label) and not label.endswith(" __main__")  # this module
    }
    own = {
        label: number
        for number in range(len(questions))
        for label in (f"T{number} of swept", f"content of T{number} in swept")
    }
    is_of_values = labels <= {*own}
    verdicts.seen = len({own[label] for label in labels}) if is_of_values else len(questions)
    for number in _wrong(runs, questions):
        right = runs[1, "eager"]["rows"][number][0]
        if runs[1, "off"]["rows"][number][0] == right:
            found = runs[1, "on"]["rows"][number][0]
            verdicts.wrong.append(f"{questions[number].name}: {found}, not {right}")
    return verdicts


def _wrong(runs: Any, questions: Sequence[Question]) -> list[int]:
    some, others = runs[1, "on"]["rows"], runs[1, "eager"]["rows"]
    return [number for number in range(len(questions)) if some[number][0] != others[number][0]]


def _generate(kind: str | None, jobs: int, log: str) -> list[list[Question]]:
    """Return the questions of each value, and of each change of a process."""
    works: list[Callable[[], Iterator[Question]]] = []
    if kind != "process":
        works += [partial(questions_of_value, row) for row in _rows("values")]
    if kind != "value":
        works += [partial(questions_of_process, row) for row in _rows("changes")]

    def run(work: Callable[[], Iterator[Question]]) -> list[Question]:
        rows, error = in_child(lambda: [asdict(each) for each in work()], 100, log)
        if error:
            raise RuntimeError(f"{work}: {error}")
        return [Question(**row) for row in rows]

    with ThreadPoolExecutor(jobs) as pool:
        return [*pool.map(run, works)]


def _batches(lists: Iterable[list[Question]]) -> Iterator[list[Question]]:
    """Yield the questions that one process asks: those of values together, or of one change."""
    values = [question for each in lists for question in each if question.kind == "value"]
    changes = [each for each in lists if each and each[0].kind == "process"]
    for questions in (values, *changes):
        for start in range(0, len(questions), _IN_A_PROCESS):
            yield questions[start : start + _IN_A_PROCESS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate the questions, judge them, and print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tests.features.recall.sweep")
    parser.add_argument("words", nargs="*", help="parts of the names of questions")
    parser.add_argument("--kind", choices=("value", "process"), help="only this kind")
    parser.add_argument("--each", type=int, default=1, help="judge only each n-th")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    options = parser.parse_args(arguments)
    compiled.put_first()
    torch._inductor.config.compile_threads = 1  # threads of compilers do not survive a fork
    Agreement.other_program = lambda *_: ""  # type: ignore[method-assign]  # the second rule
    prepare_forks()
    total = Verdicts()
    with tempfile.TemporaryDirectory(prefix="s3cache-sweep-") as root:
        Path(root, "here").mkdir()
        os.chdir(f"{root}/here")  # some methods that are tried write files
        lists = [
            [
                each
                for each in some
                if not options.words or any(w in each.name for w in options.words)
            ]
            for some in _generate(options.kind, options.jobs, f"{root}/log")
        ]
        batches = [*_batches([some[:: options.each] for some in lists])]
        Path(root, "remote").mkdir(mode=0o700)
        url = f"file://{root}/remote"
        with ThreadPoolExecutor(options.jobs) as pool:
            folders = (Path(root, f"batch-{number}") for number in itertools.count())
            for verdicts in pool.map(judge, batches, folders, itertools.repeat(url)):
                for kind in ("wrong", "failed"):
                    for each in getattr(verdicts, kind):
                        print(f"{kind}: {each}", flush=True)
                for name, value in vars(verdicts).items():
                    setattr(total, name, getattr(total, name) + value)
    print(
        f"{total.asked} questions: {len(total.wrong)} wrong, {len(total.failed)} failed; "
        f"{total.recalled} frames were recalled without a change; the second rule alone would let "
        f"{total.asked - total.seen} through; {dict(total.refused)}"
    )
    return 1 if total.wrong or total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
