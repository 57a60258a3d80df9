"""Programs with one graph and different knowledge of its sizes, in pairs.

The second program must behave as without the first one's entries: the same results, errors and
compiles in each call, and guards that accept the same sizes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

from tests.equal.programs import Compile, Pair, eagerly
from tests.support.modules import execute

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
KINDS = ("aot", "fx", "recall")  # of entries


@dataclass(frozen=True)
class Program:
    """A branch in the code, marks, options, and the sizes of the calls."""

    branch: str = ""
    mark: str = ""
    dynamic: bool | None = True
    stance: str = "default"
    option: str = ""
    sizes: tuple[int, ...] = SIZES[0]
    kind: str = "aot"

    def __str__(self) -> str:
        said = self.branch.replace("\n    ", "; "), self.mark, f"dynamic={self.dynamic}"
        return " | ".join((*said, self.stance, self.option, str(self.sizes)))

    def play(self, compile_it: Compile) -> Iterator[Any]:
        """Yield what each call does, and then what its guards accept."""
        function = _functions()[self.branch]
        with contextlib.ExitStack() as stack:
            if self.kind == "fx":
                stack.enter_context(functorch.patch(enable_autograd_cache=False))
            if self.option:
                own = self.option == "backed_size_oblivious"
                config: Any = torch.fx.experimental._config if own else torch._dynamo.config
                stack.enter_context(config.patch({self.option: True}))
            compiled = compile_it(function, dynamic=self.dynamic)
            for number, size in enumerate(self.sizes):
                if number and self.stance != "default" and compile_it is not eagerly:
                    stack.enter_context(torch.compiler.set_stance(self.stance))
                try:
                    yield compiled(*self._inputs(size))
                except Exception as exc:
                    text = re.sub(r"0x[0-9a-f]+", "0x", f"raises {type(exc).__name__}: {exc}")
                    # A recalled frame has one guard at first, and a text names the guard.
                    yield text.partition("triggered by")[0] if self.kind == "recall" else text
            entries = _debug_get_cache_entry_list(function.__code__)
            yield sorted([n for n in CHECKED if self._accepts(each, n)] for each in entries)

    def _inputs(self, size: int) -> list[Any]:
        x = torch.linspace(-1, 1, size * 4).reshape(size, 4)
        if self.mark:
            name, _, arguments = self.mark.partition("(")
            scope = {"f": getattr(torch._dynamo.decorators, name), "x": x}
            with contextlib.suppress(IndexError):
                eval(f"f({arguments}", scope)
        return [x, torch.linspace(0, 1, 44).reshape(11, 4), torch.ones(4, 3), 6]

    def _accepts(self, entry: Any, size: int) -> bool:
        names = ("x", "y", "w", "n")
        return bool(entry.guard_manager.check(dict(zip(names, self._inputs(size), strict=True))))


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return a function for each branch, from a file with its source."""
    text = "import torch\n" + "".join(
        f"def function_{number}(x, y, w, n):\n    s, t = x.size(0), y.size(0)\n    {branch}\n"
        "    return x @ w, y @ w\n\n"
        for number, branch in enumerate(BRANCHES)
    )
    path = Path(tempfile.mkdtemp(prefix="s3cache-equal-"), "sizes_of_programs.py")
    path.write_text(text, encoding="utf-8")
    module = execute(path)
    return {branch: getattr(module, f"function_{number}") for number, branch in enumerate(BRANCHES)}


def pairs(count: int = 240) -> Iterator[Pair]:
    """Yield that many pairs for each kind of entry."""
    for kind in KINDS:
        for first, second in _drawn(count, kind):
            yield _pair(kind, first, second)


def _pair(kind: str, first: Program, second: Program, must_hit: bool = False) -> Pair:
    one, other = replace(first, kind=kind), replace(second, kind=kind)
    return Pair(
        f"sizes {kind}",
        f"{first} -> {second}",
        one,
        other,
        must_hit=must_hit,
        as_cold=True,
        filled=f"{kind} {first}",
        recall=kind == "recall",
    )


def _drawn(count: int, kind: str) -> list[tuple[Program, Program]]:
    """Return pairs, always the same ones: first those that differ in one thing, then others."""
    draw = random.Random(kind)
    plain = Program()
    some: list[tuple[Program, Program]] = []

    def add(one: Program, other: Program) -> None:
        some.extend(pair for pair in ((one, other), (other, one)) if pair not in some)

    for branch in BRANCHES[1:] if kind != "recall" else ():
        for sizes in SIZES[:2]:
            add(replace(plain, branch=branch, sizes=sizes), replace(plain, sizes=sizes))
    for mark in MARKS[1:]:
        for branch in BRANCHES[:2]:
            add(replace(plain, branch=branch, mark=mark), replace(plain, branch=branch))
    for marks in itertools.combinations(MARKS, 2):
        one, other = (Program(mark=mark, dynamic=None, sizes=(5, 9, 50)) for mark in marks)
        add(one, other)
    draw.shuffle(some)
    del some[count // (4 if kind == "recall" else 2) :]  # a frame with other marks is another one
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
        if kind == "recall":  # and so is one with other code
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


_PLAIN, _AGAIN, _BRANCH = Program(), Program(sizes=(12, 5)), Program("if s < 10: pass")
_BOUNDED = Program("", "mark_dynamic(x, 0, min=3, max=10)", None, sizes=(5, 9))
_UNBOUNDED = replace(_BOUNDED, mark="mark_dynamic(x, 0)")
_FEW = [
    _pair("aot", _BRANCH, _PLAIN),
    _pair("aot", _PLAIN, _BRANCH),
    _pair("aot", _PLAIN, _AGAIN, must_hit=True),
    _pair("aot", _BRANCH, replace(_PLAIN, stance="fail_on_recompile")),
    _pair("aot", replace(_BOUNDED, branch="if s < 10: pass"), _BOUNDED),
    _pair("fx", Program("if s % 2: pass"), _PLAIN),
    _pair("fx", _PLAIN, _AGAIN, must_hit=True),
    _pair("recall", _UNBOUNDED, _BOUNDED),
    _pair("recall", _BOUNDED, _UNBOUNDED),
    _pair("recall", _BOUNDED, replace(_BOUNDED, sizes=(9, 5)), must_hit=True),
    _pair("recall", Program(dynamic=None, sizes=(5,)), Program(dynamic=None, sizes=(7, 5, 9))),
]
#: The pairs that ``make test-all`` judges; those that know the same must hit.
A_FEW = [replace(each, native=False) for each in _FEW]
