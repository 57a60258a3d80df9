"""Edit real programs: no mutant may be recalled wrongly from what its original has saved.

    python -m tests.features.recall.mutations [--programs N] [--each N] [--seed S] [NAME ...]

An original runs once and saves its frames. Each mutant then looks its frames up there; those that
are not recalled run eagerly, which takes little time. If a frame was recalled, the mutant runs
again with the compiler, and must do the same, to the bit, as torch without s3cache: with the first
rule alone (what Dynamo read), and with both. The second rule alone (the program) lets a mutant
through if it agrees where the first one does not, and the mutant does something else.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import itertools
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import convert_frame
from torch._dynamo.types import ConvertFrameReturn
from torch.utils._pytree import tree_leaves

import s3cache
from s3cache.features.recall.agreement import Agreement
from s3cache.features.recall.program import Facts, difference
from s3cache.features.recall.program import Program as Second
from tests.features.recall.mutants import (
    KINDS,
    Mutant,
    Program,
    mutants_of,
    real_programs,
    unchanged,
    write,
)
from tests.features.recall.serving import prepare_forks
from tests.support import compiled
from tests.support.children import in_child

_TIMEOUT_S = 120
_SAMPLE = 40  # each such mutant runs with the compiler even if no frame was recalled


@dataclass
class Verdicts:
    """The verdicts on mutants.

    Attributes:
        counts: by kind of mutant. ``mutants``; ``failed``: raise an error in eager mode too;
            ``changed``: do something else than the original; ``recalled``: have recalled frames;
            ``first``, ``second``: are wrong with this rule alone; ``wrong``: are wrong with both.
        frames: frames of unchanged programs: recalled, and refused by reason.
        wrong: the wrong mutants, and errors of recall.
        let_through: mutants that one rule alone lets through.
    """

    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in KINDS}
    )
    frames: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    let_through: list[str] = field(default_factory=list)

    def update(self, others: Verdicts) -> None:
        """Add the verdicts on mutants of another program."""
        for kind, counts in others.counts.items():
            self.counts[kind].update(counts)
        self.frames.update(others.frames)
        self.wrong += others.wrong
        self.let_through += others.let_through

    def lines(self) -> Iterator[str]:
        """Yield a table with a line for each kind, and one for all."""
        columns = ("mutants", "failed", "changed", "recalled", "first", "second", "wrong")
        yield f"{'':16}" + "".join(f"{name:>10}" for name in columns)
        total: Counter[str] = sum(self.counts.values(), Counter())
        for kind, counts in [*self.counts.items(), ("all", total)]:
            yield f"{kind:16}" + "".join(f"{counts[name]:10}" for name in columns)
        yield f"unchanged programs: {dict(sorted(self.frames.items()))}"


# -- in a fork


def _play(folder: str, variables: Mapping[str, str], url: str, how: str, known: Any) -> Any:
    """Run a program in one way; return what it did, and what recall did.

    ``how``: ``eager``; ``compiled`` by torch alone; with recall, ``quick``: frames that are not
    recalled run eagerly, by the first rule; ``first``: by the first rule; ``both`` rules; or
    ``saves``. ``known`` are the facts of programs that have saved frames.
    """
    warnings.simplefilter("ignore")
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = [folder, f"{folder}/site-packages"]
    looks: list[tuple[int, bool]] = []  # frames recalled before, and whether the second rule agrees
    facts: list[dict[str, str]] = []
    found: dict[str, Any] = {"looks": looks, "facts": facts, "counts": {}, "log": []}
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fallback_by_default = True  # compiles in a tenth of the time
    with contextlib.ExitStack() as stack:
        if how == "quick":
            convert_frame._compile = _runs_eagerly
        if how in ("quick", "first"):
            Agreement.other_program = lambda *_: ""  # type: ignore[method-assign]
        if how not in ("eager", "compiled"):
            os.environ["S3CACHE_RECALL_CANARY"] = "1000000000"
            local = stack.enter_context(tempfile.TemporaryDirectory())
            mode: Any = "read-write" if how == "saves" else "read-only"
            cache = stack.enter_context(s3cache.enabled(url, local_dir=local, mode=mode))
            _note_looks(cache, known, looks, facts if how == "saves" else [])
            handler = _Lines(found["log"])
            logging.getLogger("s3cache").addHandler(handler)
            logging.getLogger("s3cache.recall").setLevel(logging.INFO)
        torch.manual_seed(0)
        compile_it: Any = (lambda f, **_: f) if how == "eager" else torch.compile
        try:
            values = importlib.import_module("main").run(compile_it)
            found["outcome"] = [_text(each) for each in tree_leaves(values)]
        except Exception as exc:
            # Dynamo raises some errors of a program as another one.
            found["outcome"] = [type(exc).__name__ if how == "eager" else "raises"]
            found["error"] = f"{type(exc).__name__}: {exc}"[:300]
        if how not in ("eager", "compiled"):
            assert not cache.flush(60).remaining
            counts = cache.stats().features["recall"]
            found["counts"] = {name: int(n) for name, n in counts.items() if n}
    return found


@functools.wraps(convert_frame._compile)  # recall inspects its arguments
def _runs_eagerly(*_: Any, **__: Any) -> ConvertFrameReturn:
    skip = eval_frame._FrameAction.SKIP  # also what the frame calls
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def _note_looks(
    cache: Any, known: Sequence[Sequence[Mapping[str, str]]], looks: list[Any], facts: list[Any]
) -> None:
    """Note at each frame how many were recalled before, and what the second rule says."""
    second, look = Second(), Agreement.look
    expected: list[list[Facts]] = [
        [{label: bytes.fromhex(fact) for label, fact in facts.items()} for facts in both]
        for both in known
    ]

    def noting(self: Agreement) -> bytes:
        now = second.facts()
        recalled = int(cache.stats().features["recall"]["recalled"])
        looks.append((recalled, any(not difference(now, both) for both in expected)))
        facts.append({label: fact.hex() for label, fact in now.items()})
        return look(self)

    Agreement.look = noting  # type: ignore[method-assign]


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}"[:400])


def _text(value: Any) -> str:
    """Return a text that is equal if a value is equal to the bit."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    data = value.detach().contiguous().view(torch.uint8) if value.dim() else value.detach()
    digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
    return f"{value.dtype} {[*value.shape]} {value.requires_grad} {digest}"


# -- judging


class Judge:
    """Judges mutants of one program, which has a folder and a store of its own."""

    def __init__(self, program: Program, root: Path) -> None:
        self._program, self._root = program, root
        self._numbers = itertools.count()
        (root / "remote").mkdir(parents=True, mode=0o700)
        self.verdicts = Verdicts()
        base = unchanged(program)
        self._eager = self._run(base, "eager")
        first = self._run(base, "saves")
        second = self._run(base, "saves")  # another process must confirm what the first one saved
        self._known = [*zip(first["facts"], second["facts"], strict=False)]
        again = self._run(base, "both")
        self._has_breaks = any("torch_dynamo_resume" in line for line in again["log"])
        recalled = again["counts"].get("recalled", 0)
        self._never = len(again["looks"]) - recalled
        frames = self.verdicts.frames
        frames.update({"programs": 1, "recalled": recalled, "not recalled": self._never})
        frames.update({k: n for k, n in again["counts"].items() if k.startswith("refused:")})
        lines = [line for line in first["log"] if "is not recalled" in line]
        for line in dict.fromkeys(lines):
            print(f"{program.name}: {line}", flush=True)
        for number, run in enumerate((first, second, again)):
            self._check(f"{program.name}, unchanged (run {number})", run, first)
        if "error" in first or self._eager["outcome"] != self._run(base, "eager")["outcome"]:
            self.verdicts.wrong.append(f"{program.name} varies or fails: {first.get('error')}")

    def _run(self, mutant: Mutant, how: str) -> Any:
        folder = self._root / f"{next(self._numbers)}"
        write(mutant, folder)
        variables, url = mutant.program.variables, f"file://{self._root}/remote"
        known = getattr(self, "_known", [])
        work = partial(_play, str(folder), variables, url, how, known)
        found, error = in_child(work, _TIMEOUT_S, f"{self._root}/log")
        if error:
            found = {"looks": [], "facts": [], "counts": {}, "log": [], "error": error}
            found["outcome"] = [f"died: {error}"]
        return found

    def _check(self, name: str, run: Any, usual: Any) -> bool:
        """Note the mistakes of a run, compared with torch's; return whether it is right."""
        faults = [line for line in run["log"] if not line.startswith("INFO")]
        if run["outcome"] != usual["outcome"]:
            faults.append(f"{_first(run)}, not {_first(usual)}")
        self.verdicts.wrong += [f"{name}: {fault}" for fault in faults]
        return not faults

    def judge(self, mutant: Mutant, number: int) -> None:
        """Judge one mutant."""
        counts = self.verdicts.counts[mutant.kind]
        eager = self._run(mutant, "eager")
        name = f"{self._program.name}, {mutant.kind}: {mutant.words}"
        is_changed = eager["outcome"] != self._eager["outcome"]
        counts["mutants"] += 1
        counts["failed"] += "error" in eager
        counts["changed"] += is_changed
        if eager["outcome"][0].startswith("died"):  # it does not end
            return
        quick = self._run(mutant, "quick")
        ends = [recalled for recalled, _ in quick["looks"][1:]]
        ends.append(quick["counts"].get("recalled", 0))
        verdicts = [
            (after > before, agrees)
            for (before, agrees), after in zip(quick["looks"], ends, strict=False)
        ]
        by_second = sum(agrees and not recalled for recalled, agrees in verdicts)
        if is_changed and by_second > self._never:
            counts["second"] += 1
            self.verdicts.let_through.append(f"second rule: {name}")
        if "died" in quick["outcome"][0] or [x for x in quick["log"] if not x.startswith("INFO")]:
            self.verdicts.wrong.append(f"{name}: {quick['log']} {quick.get('error')}")
        is_sampled = self._has_breaks or number % _SAMPLE == _SAMPLE - 1
        by_first, by_both = (
            any(recalled and (agrees or not both) for recalled, agrees in verdicts)
            for both in (False, True)
        )
        if not (is_sampled or by_first):
            return
        usual = self._run(mutant, "compiled")
        if by_first or self._has_breaks:
            first = self._run(mutant, "first")
            if first["outcome"] != usual["outcome"]:
                counts["first"] += 1
                what = f"{_first(first)}, not {_first(usual)}"
                self.verdicts.let_through.append(f"first rule: {name}: {what}")
        if by_both or is_sampled:
            both = self._run(mutant, "both")
            counts["recalled"] += bool(both["counts"].get("recalled"))
            counts["wrong"] += not self._check(name, both, usual)


def _first(run: Any) -> str:
    return f"{run['outcome'][:2]} {run.get('error', '')}"


def judge(program: Program, root: Path, each: int, seed: int) -> Verdicts:
    """Judge ``each`` mutants of a program."""
    judged = Judge(program, root)
    for number, mutant in enumerate(mutants_of(program, each, seed)):
        judged.judge(mutant, number)
    return judged.verdicts


def judge_all(programs: Sequence[Program], root: Path, each: int, seed: int, jobs: int) -> Verdicts:
    """Judge mutants of programs, ``jobs`` programs at a time, after :func:`prepare_forks`."""
    total = Verdicts()
    places = [root / str(number) for number, _ in enumerate(programs)]
    judge_one = partial(judge, each=each, seed=seed)
    with ThreadPoolExecutor(jobs) as pool:
        for program, found in zip(programs, pool.map(judge_one, programs, places), strict=True):
            counts = dict(sum(found.counts.values(), Counter()))
            print(f"{program.name}: {counts}", *found.wrong, sep="\n  ", flush=True)
            total.update(found)
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutants, and print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tests.features.recall.mutations")
    parser.add_argument("words", nargs="*", help="parts of the names of programs")
    parser.add_argument("--programs", type=int, default=1000, help="at most so many programs")
    parser.add_argument("--each", type=int, default=60, help="mutants of each program (60)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the mutants (0)")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time (2)")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    programs = [each for each in real_programs() if any(word in each.name for word in words)]
    compiled.put_first()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    torch._inductor.config.compile_threads = 1  # threads of compilers do not survive a fork
    prepare_forks()
    with tempfile.TemporaryDirectory(prefix="s3cache-mutations-") as root:
        chosen = programs[: options.programs]
        found = judge_all(chosen, Path(root), options.each, options.seed, options.jobs)
    print(*found.let_through, *found.lines(), sep="\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
