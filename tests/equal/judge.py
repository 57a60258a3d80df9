"""Judge pairs of programs: on the first one's cache, the second one misses or is right.

Right means that it does in each call what a cold compile does: results, mutations, gradients and
errors are equal, and so is the number of graphs that are compiled or come from the cache.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch._dynamo.utils import counters
from torch._inductor.codecache import FxGraphCache

import s3cache
from tests.equal.observe import SEEN, difference, observe
from tests.equal.programs import Pair, Playable, eagerly
from tests.support.caching import existing

_LISTED = ("right", "wrong", "lost", "broken")
_STEADY = 20  # comparisons of keys between two checks that a base still has its key


@dataclass
class Verdicts:
    """The verdict on each pair.

    Attributes:
        counts: by family and verdict. ``miss``: another key, or no hit. ``refused``: no key.
            ``right``: a hit with the right answer. ``wrong``: another answer than a cold compile.
            ``lost``: a base lost its key. ``broken``: torch itself raises, with nothing cached.
        right, wrong, lost, broken: the pairs with this verdict, and the reasons.
        totals: the lookups of second programs by kind of entry, and pairs in which a cold compile
            raises an error or recompiles.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, pair: Any, verdict: str, why: str = "") -> None:
        """Count a verdict on a pair, or on something else with a ``family``."""
        self.counts.setdefault(pair.family, Counter())[verdict] += 1
        if verdict in _LISTED:
            getattr(self, verdict).append(f"{pair}{f': {why}' if why else ''}")

    def update(self, others: Mapping[str, Any]) -> None:
        """Add verdicts from another process, as :meth:`as_dict` returns them."""
        for family, counts in others["counts"].items():
            self.counts.setdefault(family, Counter()).update(counts)
        for name in _LISTED:
            getattr(self, name).extend(others[name])
        self.totals.update(others["totals"])

    @property
    def judged(self) -> int:
        """The number of pairs that could be judged."""
        return sum(sum(family.values()) for family in self.counts.values()) - len(self.broken)

    def lines(self) -> list[str]:
        """Return lines with the counts of each family, and the pairs that are not right."""
        lines = [
            f"{family:14} " + " ".join(f"{name} {n}" for name, n in sorted(counts.items()))
            for family, counts in sorted(self.counts.items())
        ]
        for name in ("broken", "lost", "wrong"):
            lines += [f"{name}: {each}" for each in getattr(self, name)]
        return [*lines, ", ".join(f"{n} {name}" for name, n in sorted(self.totals.items()) if n)]

    def as_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain data."""
        return {**vars(self), "judged": self.judged}


@dataclass
class Played:
    """What was observed after each step, the graphs compiled in each, and counts of lookups."""

    steps: list[Any] = field(default_factory=list)
    compiles: list[int] = field(default_factory=list)
    lookups: dict[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        return sum(count for name, count in self.lookups.items() if name.endswith("hits"))

    @property
    def raises(self) -> bool:
        return any(step[0].get("text", "").startswith("'raises ") for step in self.steps if step)

    def difference(self, other: Played) -> str:
        """Return where another result differs by more than rounding."""
        for number, (ours, theirs) in enumerate(zip(self.steps, other.steps, strict=True)):
            if why := difference(ours, theirs, fields=SEEN):
                return f"call {number}: {why}"
        return ""


def play(program: Playable, compile_it: Any, compiles: Callable[[], int] = lambda: 0) -> Played:
    """Play a program on a fresh Dynamo. ``compiles`` counts the graphs so far."""
    torch._dynamo.reset()
    played, before = Played(), compiles()
    try:
        for step in program.play(compile_it):
            played.steps.append(observe(step))
            now = compiles()
            played.compiles.append(now - before)
            before = now
    finally:
        torch._dynamo.reset()
    return played


class _Stop(BaseException):
    """Ends a program from inside; Dynamo and programs do not catch it."""


def keys(program: Playable) -> list[str | None]:
    """Return the keys of the graphs of a first call, ``None`` for graphs that cannot be cached."""
    found: list[str | None] = []

    def checked(function: Any, **options: Any) -> Any:
        def call(*args: Any) -> NoReturn:
            report = s3cache.check(torch.compile(function, **options), *args)
            found.extend(graph.key for graph in report.graphs)
            raise _Stop

        return call

    steps: list[Any] = []
    with contextlib.suppress(_Stop):
        steps += program.play(checked)
    if steps:
        raise ValueError(steps[0])
    return found


@functools.wraps(torch._dynamo.convert_frame._compile)  # hooks inspect its arguments
def _trace_nothing(*_: Any, **__: Any) -> NoReturn:
    raise _Stop


def _cold(program: Playable) -> Played:
    FxGraphCache.clear()  # torch's own cache may have graphs that are bypassed here
    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False):
        return play(program, torch.compile, lambda: counters["stats"]["unique_graphs"])


def _cached(program: Playable, directory: str, recall: bool) -> Played:
    FxGraphCache.clear()  # before s3cache is enabled: later this would clear its entries too
    options = existing(job_profiles=False) | ({"recall": "on"} if recall else {})
    with s3cache.enabled(local_dir=directory, record=False, **options) as cache:
        assert s3cache.active() is cache

        def recalled() -> int:
            return int(cache.stats().features["recall"]["recalled"]) if recall else 0

        played = play(
            program, torch.compile, lambda: counters["stats"]["unique_graphs"] + recalled()
        )
        stats = cache.stats()
        frames: Any = stats.features["recall"] if recall else {}
    played.lookups = {
        "AOT hits": sum(stats.hits.values()),
        "FX hits": sum(stats.fx.hits.values()),
        "AOT misses": sum(stats.misses.values()),
        "FX misses": sum(stats.fx.misses.values()),
        "bypasses": stats.bypassed,
        "saved": stats.saved + stats.fx.saved,
        **{f"frames {name}": frames[name] for name in ("saved", "refused") if name in frames},
    }
    if recall:  # hits of graphs inside a frame that is traced are no concern of such a pair
        del played.lookups["AOT hits"], played.lookups["FX hits"]
        played.lookups["frame hits"] = frames["recalled"]
    return played


class Judge:
    """Judges one pair after the other in this process."""

    def __init__(self) -> None:
        self.verdicts = Verdicts()
        self._filled: dict[str, str] = {}
        self._keys: dict[str, list[str | None]] = {}
        self._compared = 0
        # Once this was set, torch keeps a precision for each library, which is part of keys.
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())

    def judge(self, pair: Pair) -> None:
        """Judge whether the second program does the same on the first one's cache as without."""
        torch.set_flush_denormal(False)  # kernels with unsafe math turn it on, and keys differ
        with inductor.patch(fallback_by_default=not pair.native):
            verdict = self._by_keys(pair) if pair.by_key and not pair.recall else None
            self.verdicts.add(pair, *(verdict or self._by_runs(pair)))

    def _by_keys(self, pair: Pair) -> tuple[str, str] | None:
        """Return a verdict if a program has no key, or if they have different ones."""
        base = pair.filled
        try:
            if base not in self._keys:
                self._keys[base] = keys(pair.first)
            elif self._compared % _STEADY == 0 and keys(pair.first) != self._keys[base]:
                # Otherwise all later changes would seem to miss.
                self.verdicts.add(pair, "lost", "a change was not undone: its base has another key")
            self._compared += 1
            found = keys(pair.second)
        except Exception as exc:
            return "broken", "".join(traceback.format_exception_only(exc))[:300]
        if None in self._keys[base]:
            return "lost", "its base has no key"
        if {*found} & {*self._keys[base]}:
            return None
        return ("refused" if None in found else "miss"), ""

    def _by_runs(self, pair: Pair) -> tuple[str, str]:
        with tempfile.TemporaryDirectory(prefix="s3cache-equal-") as directory:
            try:
                self._fill(directory, pair)
            except AssertionError as exc:  # this base fails, others can still be judged
                return ("refused" if pair.recall else "wrong"), str(exc)
            with pair.around(), contextlib.ExitStack() as stack:
                # Eager mode costs less than a cold compile, but it does not count graphs.
                usual = play(pair.second, eagerly) if pair.by_key else _cold(pair.second)
                if pair.by_key and usual.raises:
                    return "broken", str(usual.steps[-1])
                if pair.by_key and pair.recall:
                    name = torch._dynamo.convert_frame
                    stack.enter_context(patch.object(name, "_compile", _trace_nothing))
                try:
                    found = _cached(pair.second, directory, pair.recall)
                except _Stop:
                    return "miss", ""
                why = found.difference(usual)
                if why and not pair.as_cold:
                    other = _cold(pair.second) if pair.by_key else play(pair.second, eagerly)
                    why = why if found.difference(other) else ""
        self._count(found, usual)
        if not why and not pair.by_key and found.compiles != usual.compiles:
            why = f"compiles {found.compiles} graphs, not {usual.compiles}"
        if not why and pair.must_hit and not found.hits:
            why = "misses, but must hit"
        if not why and pair.all_hit and not (found.lookups["bypasses"] or usual.raises):
            misses = found.lookups["AOT misses"] + found.lookups["FX misses"]
            why = f"{misses} misses, but all must hit" if misses else ""
        return ("wrong" if why else "right" if found.hits else "miss"), why

    def _fill(self, directory: str, pair: Pair) -> None:
        """Fill ``directory`` with the entries that the first program saves."""
        if pair.filled not in self._filled:
            played = _cached(pair.first, directory, pair.recall)
            if pair.by_key:
                why = played.difference(play(pair.first, eagerly))
                assert not why, f"the base has another answer when it is compiled: {why}"
                saved = played.lookups["frames saved" if pair.recall else "saved"]
                refused = played.lookups.get("frames refused")
                assert saved > 0 == (refused or 0), f"the base was not saved: {played.lookups}"
            if not pair.filled:
                return
            self._filled[pair.filled] = tempfile.mkdtemp(prefix="s3cache-equal-")
            shutil.copytree(directory, self._filled[pair.filled], dirs_exist_ok=True)
        # A copy: the next program must not find entries that this one saves.
        shutil.copytree(self._filled[pair.filled], directory, dirs_exist_ok=True)

    def _count(self, found: Played, usual: Played) -> None:
        self.verdicts.totals.update(found.lookups)
        self.verdicts.totals["pairs with an error"] += usual.raises
        self.verdicts.totals["pairs with a recompile"] += sum(usual.compiles) > 1


def judge(pairs: Iterable[Pair]) -> Verdicts:
    """Judge pairs in this process."""
    judged = Judge()
    for pair in pairs:
        judged.judge(pair)
    return judged.verdicts
