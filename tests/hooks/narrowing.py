"""Programs with one graph and different knowledge of its sizes, in pairs.

    python -m tests.hooks.narrowing [--level aot|fx|recall] [--pairs N]

The first program of a pair fills a store. The second one then runs on a fresh machine with that
store, and must behave as without it: the same results, errors and compiles in each call, and guards
that accept the same sizes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import itertools
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.hooks.jobs import machine_here

#: Code before the operator. ``s`` is the dynamic size of ``x``, ``t`` that of ``y``.
BRANCHES = (
    "",
    "if s < 10: pass",
    "if s > 4: pass",
    "if 3 < s < 20: pass",
    "if s % 2: pass",
    "if s % 4 == 1: pass",
    "if s == 5: pass",
    "if s != 7: pass",
    "if s // 4 > 2: pass",
    "if s * 3 < 40: pass",
    "if max(s, 8) > 9: pass",
    "if min(s, 30) == 30: pass",
    "if s < 10 or s % 3 == 0: pass",
    "if s + t < 40: pass",
    "if s == t: pass",
    "if s > t: pass",
    "if s < 10 and t > 4: pass",
    "if (s * t) % 2: pass",
    "if s < n: pass",
    "if n > 3: pass",
    "torch._check(s < 100)",
    "torch._check(s != 13)",
    "torch._check(s >= 3)",
    "assert s < 60",
    "torch._check(s * 2 > t - 40)",
    "if s < 10: pass\n    if s % 2: pass",
    "if s % 2: pass\n    if s < 10: pass",
    "if s.bit_length() > 3 if type(s) is int else s > 7: pass",
    "for _ in range(min(s, 2)): pass",
    "x.view(s, 2, 2)",
)
#: Marks on ``x`` before the call.
MARKS = (
    "",
    "mark_dynamic(x, 0)",
    "mark_dynamic(x, 0, min=3, max=10)",
    "mark_dynamic(x, 0, max=40)",
    "mark_dynamic(x, 0, min=3)",
    "mark_dynamic(x, 0, hint_override=16)",
    "mark_dynamic(x, 0, specialize_on=[lambda size: size > 8])",
    "maybe_mark_dynamic(x, 0)",
    "mark_unbacked(x, 0)",
    "mark_unbacked(x, 0, min=2, max=64)",
    "mark_unbacked(x, 0, max=8)",
    "mark_static(x, 0)",
)
#: Marks with which torch compiles at all, and which recall accepts.
MARKS_OF_RECALL = tuple(
    mark for mark in MARKS if not re.search(r"dynamic.*(0, max|min=3\)|specialize)", mark)
)
STANCES = ("default", "fail_on_recompile", "eager_on_recompile")
SIZES = ((5, 50), (50, 5), (6, 9, 12), (12, 5, 30, 5), (8, 64, 3), (5, 5, 1, 40), (2, 13, 7))
OPTIONS = (
    "",
    "backed_size_oblivious",
    "automatic_dynamic_exclusion_guard",  # no frame is recalled with it
)
#: Sizes for which the guards of each compiled graph are checked.
CHECKED = (*range(33), 39, 40, 41, 50, 59, 60, 61, 64, 65, 99, 100, 101)


@dataclass(frozen=True)
class Program:
    """One program: a branch in its code, marks, options, and the sizes of its calls."""

    branch: str = ""
    mark: str = ""
    dynamic: bool | None = True
    stance: str = "default"
    option: str = ""
    sizes: tuple[int, ...] = SIZES[0]

    def __str__(self) -> str:
        said = self.branch.replace("\n    ", "; "), self.mark, f"dynamic={self.dynamic}"
        return " | ".join((*said, self.stance, self.option, str(self.sizes)))


def pairs(count: int, level: str) -> list[tuple[Program, Program]]:
    """Return pairs, always the same ones: first those that differ in one thing, then others."""
    draw = random.Random(level)
    plain = Program()
    some: list[tuple[Program, Program]] = []

    def add(one: Program, other: Program) -> None:
        for pair in ((one, other), (other, one)):
            if pair not in some:
                some.append(pair)

    for branch in BRANCHES[1:] if level != "recall" else ():
        for sizes in SIZES[:2]:
            add(replace(plain, branch=branch, sizes=sizes), replace(plain, sizes=sizes))
    for mark in MARKS[1:]:
        for branch in BRANCHES[:2]:
            add(replace(plain, branch=branch, mark=mark), replace(plain, branch=branch))
    for marks in itertools.combinations(MARKS, 2):
        one, other = (Program(mark=mark, dynamic=None, sizes=(5, 9, 50)) for mark in marks)
        add(one, other)
    draw.shuffle(some)
    del some[count // (4 if level == "recall" else 2) :]  # a frame with other marks is another one
    while len(some) < count:
        one, other = (
            Program(
                draw.choice(BRANCHES),
                draw.choice(MARKS),
                draw.choice((True, True, None)),
                draw.choice(STANCES),
                draw.choice((*OPTIONS[:1] * 3, *OPTIONS)),
                draw.choice(SIZES),
            )
            for _ in range(2)
        )
        if level == "recall":  # and so is one with other code
            one = replace(one, mark=draw.choice(MARKS_OF_RECALL), stance="default")
            other = replace(one, sizes=other.sizes, stance=other.stance)
            if draw.random() < 0.2:
                other = replace(other, mark=draw.choice(MARKS_OF_RECALL))
        elif draw.random() < 0.4:  # these know the same, so that most of them hit
            other = replace(one, sizes=other.sizes, stance=other.stance)
        elif draw.random() < 0.5:
            other = replace(other, option=one.option, mark=one.mark)
        add(one, other)
    draw.shuffle(some)
    return some[:count]


# -- running a program


def _functions(place: str) -> dict[str, Callable[..., Any]]:
    """Return a function for each branch, from a file with its source."""
    lines = ["import torch", ""]
    for number, branch in enumerate(BRANCHES):
        body = f"    {branch}\n" if branch else ""
        lines.append(
            f"def function_{number}(x, y, w, n):\n    s, t = x.size(0), y.size(0)\n{body}"
            "    return x @ w, y @ w\n\n"
        )
    path = os.path.join(place, "narrowing_programs.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    spec = importlib.util.spec_from_file_location("narrowing_programs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {branch: getattr(module, f"function_{number}") for number, branch in enumerate(BRANCHES)}


def _inputs(size: int, mark: str) -> list[Any]:
    import torch

    x = torch.linspace(-1, 1, size * 4).reshape(size, 4)
    if mark:
        name, _, arguments = mark.partition("(")
        scope = {"f": getattr(torch._dynamo.decorators, name), "x": x}
        with contextlib.suppress(IndexError):
            eval(f"f({arguments}", scope)
    return [x, torch.linspace(0, 1, 44).reshape(11, 4), torch.ones(4, 3), 6]


def behaviour(
    program: Program, function: Callable[..., Any], recalled: Callable[[], int]
) -> list[Any]:
    """Run the program on a fresh Dynamo: what each call does, and what its guards accept."""
    import torch
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    found: list[Any] = []
    with contextlib.ExitStack() as stack:
        if program.option == "backed_size_oblivious":
            shapes: Any = torch.fx.experimental._config
            stack.enter_context(shapes.patch(backed_size_oblivious=True))
        elif program.option:
            stack.enter_context(torch._dynamo.config.patch({program.option: True}))
        compiled = torch.compile(function, dynamic=program.dynamic)
        for number, size in enumerate(program.sizes):
            if number and program.stance != "default":
                stack.enter_context(torch.compiler.set_stance(program.stance))
            counters.clear()
            before = recalled()
            args = _inputs(size, program.mark)
            try:
                got: Any = [each.tolist() for each in compiled(*args)]
                got = got == [each.tolist() for each in function(*args)]
            except Exception as exc:
                got = _said(exc)
            compiles = counters["stats"]["unique_graphs"] + recalled() - before
            found.append([size, got, compiles])
        accepted = []
        for entry in _debug_get_cache_entry_list(function.__code__):
            accepted.append([n for n in CHECKED if _accepts(entry, function, n, program.mark)])
        found.append(sorted(accepted))
    return found


def _accepts(entry: Any, function: Callable[..., Any], size: int, mark: str) -> bool:
    names = function.__code__.co_varnames
    return bool(entry.guard_manager.check(dict(zip(names, _inputs(size, mark), strict=False))))


def _said(error: Exception) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")


# -- judging


class Judge:
    """Runs programs on machines of this process, each behaviour without a store once."""

    def __init__(self, root: str, level: str) -> None:
        self._root, self._level = root, level
        self._functions = _functions(root)
        self._numbers = itertools.count()
        self._alone: dict[Program, tuple[str, list[Any]]] = {}
        self.hits: collections.Counter[str] = collections.Counter()

    @property
    def programs(self) -> list[Program]:
        """The programs so far."""
        return [*self._alone]

    def alone(self, program: Program) -> list[Any]:
        """Return the behaviour of a program on an empty store, which it fills."""
        if program not in self._alone:
            url = f"file://{self._root}/store-{next(self._numbers)}?create=1"
            self._alone[program] = url, self._run(program, url)
        return self._alone[program][1]

    def after(self, first: Program, program: Program) -> list[Any]:
        """Return the behaviour of a program on a store that another one has filled."""
        self.alone(first)
        return self._run(program, self._alone[first][0], "read-only")

    def _run(self, program: Program, url: str, mode: str = "read-write") -> list[Any]:
        import torch

        options: dict[str, Any] = {"mode": mode, "job_profiles": False}
        options["record"] = False
        if self._level == "recall":
            options["recall"] = "on"
        with contextlib.ExitStack() as stack:
            if self._level == "fx":
                off = torch._functorch.config.patch(enable_autograd_cache=False)
                stack.enter_context(off)
            name = f"machine-{next(self._numbers)}"
            cache = stack.enter_context(machine_here(url, name, **options))
            found = behaviour(
                program,
                self._functions[program.branch],
                lambda: cache.stats().features["recall"]["recalled"],
            )
            cache.flush(30)
            stats = cache.stats()
            level = stats.fx if self._level == "fx" else stats
            self.hits[mode] += sum(level.hits.values())
            self.hits["recalled"] += stats.features["recall"]["recalled"]
        return found


_PLAIN, _AGAIN, _BRANCH = Program(), Program(sizes=(12, 5)), Program("if s < 10: pass")
_BOUNDED = Program("", "mark_dynamic(x, 0, min=3, max=10)", None, sizes=(5, 9))
#: The pairs that ``make test`` judges.
SOME = {
    "aot": (
        (_BRANCH, _PLAIN),
        (_PLAIN, _BRANCH),
        (_PLAIN, _AGAIN),
        (_BRANCH, replace(_PLAIN, stance="fail_on_recompile")),
        (replace(_BOUNDED, branch="if s < 10: pass"), _BOUNDED),
    ),
    "fx": ((Program("if s % 2: pass"), _PLAIN), (_PLAIN, _AGAIN)),
    "recall": (
        (replace(_BOUNDED, mark="mark_dynamic(x, 0)"), _BOUNDED),
        (_BOUNDED, replace(_BOUNDED, mark="mark_dynamic(x, 0)")),
        (_BOUNDED, replace(_BOUNDED, sizes=(9, 5))),
        (Program(dynamic=None, sizes=(5,)), Program(dynamic=None, sizes=(7, 5, 9))),
    ),
}


def judge(level: str, count: int, root: str | None = None) -> dict[str, Any]:
    """Judge that many pairs, or ``SOME``; return the differences and counts."""
    import torch._inductor.compile_fx  # noqa: F401 - so that the hooks are installed

    began = time.monotonic()
    judge = Judge(root or os.environ["HOME"], level)
    wrong: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    for first, second in pairs(count, level) if count else SOME[level]:
        expected, _, before = judge.alone(second), judge.alone(first), judge.hits["recalled"]
        got = judge.after(first, second)
        counts["with a recalled frame"] += judge.hits["recalled"] > before
        counts["pairs"] += 1
        counts["with an error"] += any(isinstance(each[1], str) for each in expected[:-1])
        counts["with a recompile"] += sum(each[-1] for each in expected[:-1]) > 1
        if level == "recall":
            expected, got = map(_without_guards, (expected, got))
        if got != expected:
            wrong.append(f"{first} -> {second}: {_difference(got, expected)}")
    counts["programs"] = len(judge.programs)
    counts["hits"] = judge.hits["read-only"]
    counts["recalled frames"] = judge.hits["recalled"]
    return {"wrong": wrong, **counts, "seconds": round(time.monotonic() - began)}


def _without_guards(found: list[Any]) -> list[Any]:
    """Return a behaviour without texts of guards: a recalled frame has one guard at first."""
    *calls, accepted = found
    texts = [
        text.partition("triggered by")[0] if type(text) is str else text for _, text, _ in calls
    ]
    return [*([s, text, n] for (s, _, n), text in zip(calls, texts, strict=True)), accepted]


def _difference(got: list[Any], expected: list[Any]) -> str:
    for one, other in zip(got, expected, strict=True):
        if one != other:
            return f"{one}, and not {other}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge pairs, and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.hooks.narrowing", description=__doc__)
    parser.add_argument("--level", choices=("aot", "fx", "recall"), default="aot")
    parser.add_argument("--pairs", type=int, default=240)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="s3cache-narrowing-") as root:
        os.environ["HOME"] = root
        found = judge(options.level, options.pairs, root)
    wrong = found.pop("wrong")
    print(*wrong, found, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
