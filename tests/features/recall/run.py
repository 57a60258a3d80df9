"""Change one thing that Dynamo read: the frame that was traced before must not be recalled.

    python -m tests.features.recall.run [--recall on|check|precompile] [--jobs 2] [NAME ...]

Each program runs in its variant A (twice, on two machines with one store) and in its variant B. If
the change can be made while it runs, it also runs as A that becomes B, and must then compile as
often as without recall. A third machine finds both variants in the store.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tests.equal.observe import SEEN, difference
from tests.features.recall.programs import Program, all_programs
from tests.support import compiled
from tests.support.machines import SERVERS, Machine, remote_url

Parts: TypeAlias = dict[tuple[str, str], Any]

_THIRD = 3  # every third program also runs on a third machine, with both variants in the store


@dataclass
class Verdicts:
    """The verdicts on the programs.

    Attributes:
        judged: the number of programs.
        recalled: programs with all frames recalled when they ran again without a change.
        traced: the other programs, with the reasons.
        wrong: programs with other answers than eager mode, or another number of compiles.
        broken: programs that torch gets wrong without recall too, or that do not change.
        counts: all counters of all processes, summed.
    """

    judged: int = 0
    recalled: list[str] = field(default_factory=list)
    traced: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=collections.Counter)


class _Fleet:
    """Machines that share a store, and the programs that they run."""

    def __init__(self, root: Path, jobs: int, **environment: str) -> None:
        self._root, self._jobs, self._environment = root, jobs, environment
        Path(root, "remote").mkdir()
        self._started = 0

    def run(self, wanted: Sequence[tuple[Program, Sequence[tuple[str, str]]]]) -> list[Parts]:
        """Run parts of programs, each a variant and a mode, on one more machine.

        Machines are forks of different servers in turn, so that three of them share nothing.
        """
        if not wanted:
            return []
        self._started += 1
        machine = Machine(self._root / f"machine-{self._started}", **self._environment)
        parts = [
            [
                {
                    "name": program.name,
                    "source": program.source(variant),
                    "variant": variant,
                    "how": how,
                    "save": variant != "AB",  # so that B is new to the store when it is run alone
                }
                for variant, how in plan
            ]
            for program, plan in wanted
        ]
        place, url = str(self._root / "programs"), remote_url(self._root)
        file = self._root / "wanted.json"  # too long for an argument of a process
        file.write_text(json.dumps(parts), encoding="utf-8")
        serve = "tests.features.recall.serving:serve", url, place, str(file), self._jobs
        done = machine.run(*serve, timeout_s=7000, server=self._started % SERVERS)
        plans = [plan for _, plan in wanted]
        return [
            dict(zip(plan, given, strict=True))
            for plan, given in zip(plans, done.result, strict=True)
        ]


def judge(programs: Sequence[Program], root: Path, recall: str = "on", jobs: int = 1) -> Verdicts:
    """Run programs on machines one after the other, and judge their results."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(root / "own")} if recall == "precompile" else {}
    fleet = _Fleet(root, jobs, **own)
    again = {program: "AB" if program.is_live else "A" for program in programs}
    variants = {program: sorted({"A", "B", again[program]}) for program in programs}
    right = fleet.run(
        [
            (program, [*((variant, "eager") for variant in variants[program]), ("A", recall)])
            for program in programs
        ]
    )
    second = fleet.run(
        [(program, [(again[program], recall), ("B", recall)]) for program in programs]
    )
    third = fleet.run([(program, [("B", recall), ("A", recall)]) for program in programs[::_THIRD]])
    verdicts = Verdicts(len(programs))
    suspected: dict[Program, dict[str, list[tuple[int, Any]]]] = {}
    expected_of: dict[Program, dict[str, Any]] = {}
    for number, program in enumerate(programs):
        expected = {variant: right[number][variant, "eager"] for variant in variants[program]}
        expected_of[program] = expected
        if failed := [each for each in expected.values() if isinstance(each, str)]:
            verdicts.broken.append(f"{program.name}: {failed}")
        elif expected["A"] == expected["B"]:
            verdicts.broken.append(f"{program.name}: its variants are equal")
        found = [
            right[number],
            second[number],
            *([] if number % _THIRD else [third[number // _THIRD]]),
        ]
        for machine, parts in enumerate(found, 1):
            for (variant, how), part in parts.items():
                if how == "eager":
                    continue
                _count(part, verdicts)
                if _fault(part, expected[variant]):
                    parts_of = suspected.setdefault(program, {})
                    parts_of.setdefault(variant, []).append((machine, part))
        part = second[number][again[program], recall]
        if isinstance(part, str) or part[0]["traced"] or not part[0]["recalled"]:
            why = "" if isinstance(part, str) else part[0]["refused"]
            verdicts.traced[program.name] = str(why)
        else:
            verdicts.recalled.append(program.name)
    # torch does not guard all that it reads: a fault that it has without recall is not ours.
    wanted = [(program, [(each, "off") for each in parts]) for program, parts in suspected.items()]
    for (program, plan), without in zip(wanted, fleet.run(wanted), strict=True):
        for variant, _ in plan:
            for machine, part in suspected[program][variant]:
                eager = expected_of[program][variant]
                if why := _fault(part, without[variant, "off"], eager):
                    verdicts.wrong.append(f"{program.name}: {variant} on machine {machine}: {why}")
                elif variant != "AB":
                    verdicts.broken.append(f"{program.name}: {variant}: {part}")
    return verdicts


def _count(part: Any, verdicts: Verdicts) -> None:
    for name, count in part[-1].items() if isinstance(part, list) else ():
        if isinstance(count, int):
            verdicts.counts[name] += count


def _fault(part: Any, other: Any, eager: Any = None) -> str:
    """Return what is wrong with a part, compared with eager mode or a run without recall.

    A part may be right where torch is wrong, and then compiles more often than torch.
    """
    if isinstance(part, str) or isinstance(other, str):
        return "" if _error(part) == _error(other) else f"{part}, and not {other}"
    compiled_too = isinstance(other[0], dict)
    found = [step["got"] for step in part]
    if why := differs(found, [step["got"] for step in other] if compiled_too else other):
        return "" if eager is not None and not differs(found, eager) else why
    counts = [step["traced"] + step["recalled"] for step in part]
    if compiled_too:
        usual = [step["traced"] for step in other]
    else:
        usual = [counts[0] * number for number in range(1, 1 + len(part))]
    return "" if counts == usual else f"{counts} frames are traced or recalled, and not {usual}"


def _error(part: Any) -> Any:
    """Return the class of the error that a part raised; otherwise the part."""
    found = isinstance(part, str) and re.findall(
        r"^([\w.]+Error(?:: \w+Error)?)\b", part, re.MULTILINE
    )
    return found[-1] if found else part


def differs(found: list[Any], expected: list[Any]) -> str:
    """Return the first difference between results of all steps."""
    compared = (
        difference(*pair, fields=SEEN - {"stride"}, close=1e-4)
        for pair in zip(found, expected, strict=True)
    )
    return next(filter(None, compared), "")


def sample(count: int) -> list[Program]:
    """Return ``count`` programs, always the same ones, from all parts of the table."""
    programs = all_programs()
    return [programs[number * len(programs) // count] for number in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the programs, and print the verdicts."""
    prog = "python -m tests.features.recall.run"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="parts of the names of programs; by default, all programs"
    )
    parser.add_argument("--recall", default="on", choices=("off", "check", "on", "precompile"))
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time (2)")
    parser.add_argument("--sample", type=int, help="the number of programs")
    options = parser.parse_args(arguments)
    programs = sample(options.sample) if options.sample else [*all_programs()]
    chosen = [
        program
        for program in programs
        if not options.words or any(word in program.name for word in options.words)
    ]
    compiled.put_first()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="s3cache-recall-") as root:
        verdicts = judge(chosen, Path(root), options.recall, options.jobs)
    for name, reasons in verdicts.traced.items():
        print(f"traced: {name}: {reasons}")
    for kind in ("broken", "wrong"):
        for each in getattr(verdicts, kind):
            print(f"{kind}: {each}")
    print(
        f"{verdicts.judged} programs judged in {(time.monotonic() - started) / 60:.1f} minutes: "
        f"{len(verdicts.wrong)} wrong, {len(verdicts.broken)} broken, {len(verdicts.recalled)} "
        f"recalled when run again; {dict(verdicts.counts)}"
    )
    return 1 if verdicts.wrong or verdicts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
