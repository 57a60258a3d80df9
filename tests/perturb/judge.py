"""Run changed programs on the cache of the base program: each must miss or be right."""

from __future__ import annotations

import collections
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import s3cache
from tests.perturb.program import Change, Program, Record, compiled, difference, eager, keys


class Judged(Protocol):
    """A change or history to judge; ``str()`` describes it."""

    @property
    def family(self) -> str: ...


_STEADY = 20  # changes between two checks that a base still has its key


@dataclass
class Verdicts:
    """The verdict on each change.

    Attributes:
        counts: by family and verdict. ``miss``: another key. ``refused``: no key. ``right``: the
            same key, and the answer of eager mode. ``same``: the same key, as required for a
            program made again. ``wrong``: the same key, and another answer. ``lost``: another key
            of the same program, or none. ``broken``: torch itself raises, with nothing cached.
        right, wrong, lost, broken: the changes with this verdict, and the reasons.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, change: Judged, verdict: str, why: str = "") -> None:
        """Count a verdict."""
        family = self.counts.setdefault(change.family, collections.Counter())
        family[verdict] += 1
        if verdict in ("right", "wrong", "lost", "broken"):
            getattr(self, verdict).append(f"{change}{f': {why}' if why else ''}")

    def update(self, others: Verdicts) -> None:
        """Add verdicts from elsewhere."""
        for family, counts in others.counts.items():
            self.counts.setdefault(family, collections.Counter()).update(counts)
        for name in ("right", "wrong", "lost", "broken"):
            getattr(self, name).extend(getattr(others, name))

    @property
    def judged(self) -> int:
        """The number of changes that could be judged."""
        total = sum(sum(family.values()) for family in self.counts.values())
        return total - len(self.broken)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain data."""
        return {
            "judged": self.judged,
            "counts": {name: dict(family) for name, family in sorted(self.counts.items())},
            "right": self.right,
            "wrong": self.wrong,
            "lost": self.lost,
            "broken": self.broken,
        }


def judge(bases: Mapping[str, Program], changes: Iterable[Change]) -> Verdicts:
    """Judge each change against a cache that holds its base program and nothing else."""
    verdicts = Verdicts()
    known: dict[str, list[str | None]] = {}
    shelf = _Shelf(bases)
    for number, change in enumerate(changes):
        if number % _STEADY == 0 and change.base in known:
            _check_steady(bases, change, known[change.base], verdicts)
        try:
            if change.base not in known:
                known[change.base] = keys(bases[change.base])
            found = keys(change.program)
            same = bool(set(found) & set(known[change.base]) - {None})
            expected = eager(change.program) if same and not change.same else None
        except Exception as exc:
            verdicts.add(change, "broken", "".join(traceback.format_exception_only(exc))[:300])
            continue
        if None in known[change.base]:
            verdicts.add(change, "lost", "its base has no key")
        elif change.same:
            verdicts.add(change, "same" if found == known[change.base] else "lost")
        elif expected is not None:
            try:
                why = shelf.try_hit(change, expected)
            except AssertionError as exc:  # this base fails, others can still be judged
                why = f"the hit cannot be tried: {exc}"
            verdicts.add(change, "wrong" if why else "right", why or "")
        else:
            verdicts.add(change, "refused" if None in found else "miss")
    return verdicts


def _check_steady(
    bases: Mapping[str, Program], change: Change, before: list[str | None], verdicts: Verdicts
) -> None:
    """Check a base's key: if a change was not undone, all later ones would seem to miss."""
    if keys(bases[change.base]) != before:
        verdicts.add(change, "lost", "the key of its base has changed")


class _Shelf:
    """Caches that hold one base program each, filled when they are first needed."""

    def __init__(self, bases: Mapping[str, Program]) -> None:
        self._bases = bases
        self._directories: dict[str, str] = {}

    def try_hit(self, change: Change, expected: Record) -> str | None:
        """Return what is wrong with the changed program on its base's cache, or ``None``."""
        directory = self._directories.get(change.base) or self._fill(change.base)
        # A copy: the next change must not find entries that this one saves.
        with tempfile.TemporaryDirectory(prefix="s3cache-perturb-") as copy:
            shutil.copytree(directory, copy, dirs_exist_ok=True)
            with s3cache.enabled(local_dir=copy) as cache:
                assert s3cache.active() is cache
                try:
                    found = compiled(change.program)
                except Exception as exc:
                    return "".join(traceback.format_exception_only(exc))[:300]
                hits = sum(cache.stats().hits.values())
        why = difference(found, expected)
        return f"{why} ({hits} hits)" if why else None

    def _fill(self, base: str) -> str:
        directory = tempfile.mkdtemp(prefix="s3cache-perturb-")
        self._directories[base] = directory
        with s3cache.enabled(local_dir=directory) as cache:
            assert cache is not None
            try:
                found = compiled(self._bases[base])
            except Exception as exc:
                raise AssertionError(f"base {base} cannot be compiled") from exc
            stats = cache.stats()
        assert stats.saved, f"base {base} was not saved: {stats}"
        why = difference(found, eager(self._bases[base]))
        assert why is None, f"base {base} has another answer when it is compiled: {why}"
        return directory
