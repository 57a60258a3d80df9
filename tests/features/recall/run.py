"""Change one thing that Dynamo read: the frame that was traced before must not be recalled.

    python -m tests.features.recall.run [--recall on|check|precompile] [--jobs 2] [NAME]

Each program runs in its variant A (twice, on two machines with one store) and in its variant B. If
the change can be made while it runs, it also runs as A that becomes B, and must then compile as
often as without recall. A third machine finds both variants in the store.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.equal.observe import SEEN, difference
from tests.features.recall.programs import Program, all_programs
from tests.support import compiled
from tests.support.machines import Machine, remote_url

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
    counts: Counter[str] = field(default_factory=Counter)


class _Fleet:
    """Machines that share a store, and the programs that they run."""

    def __init__(self, root: Path, jobs: int, **environment: str) -> None:
        self._root, self._jobs, self._environment = root, jobs, environment
        Path(root, "remote").mkdir()
        self._started = 0

    def run(
        self, wanted: Mapping[Program, Sequence[tuple[str, str]]]
    ) -> dict[Program, dict[tuple[str, str], Any]]:
        """Run parts of programs, each a variant and a mode, on one more machine.

        Machines are forks of different servers in turn, so that three of them share nothing.
        """
        if not wanted:
            return {}
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
            for program, plan in wanted.items()
        ]
        place, url = str(self._root / "programs"), remote_url(self._root)
        file = self._root / "wanted.json"  # too long for an argument of a process
        file.write_text(json.dumps(parts), encoding="utf-8")
        serve = "tests.features.recall.serving:serve", url, place, str(file), self._jobs
        done = machine.run(*serve, timeout_s=7000, server=self._started)
        results = zip(wanted.items(), done.result, strict=True)
        return {program: dict(zip(plan, got, strict=True)) for (program, plan), got in results}


def judge(programs: Sequence[Program], root: Path, recall: str = "on", jobs: int = 1) -> Verdicts:
    """Run programs on machines one after the other, and judge their results."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(root / "own")} if recall == "precompile" else {}
    fleet = _Fleet(root, jobs, **own)
    again = {program: "AB" if program.is_live else "A" for program in programs}
    eager = {each: [(v, "eager") for v in sorted({"A", "B", again[each]})] for each in programs}
    plans: list[dict[Program, list[tuple[str, str]]]] = [
        {each: [*eager[each], ("A", recall)] for each in programs},
        {each: [(again[each], recall), ("B", recall)] for each in programs},
        {each: [("B", recall), ("A", recall)] for each in programs[::_THIRD]},
    ]
    machines = [fleet.run(plan) for plan in plans]
    verdicts = Verdicts(len(programs))
    suspected: dict[Program, list[tuple[str, int, Any]]] = {}
    for program in programs:
        expected = {variant: machines[0][program][variant, how] for variant, how in eager[program]}
        if failed := [part for part in expected.values() if isinstance(part, str)]:
            verdicts.broken.append(f"{program.name}: {failed}")
        elif expected["A"] == expected["B"]:
            verdicts.broken.append(f"{program.name}: its variants are equal")
        for number, machine in enumerate(machines, 1):
            for (variant, how), part in machine.get(program, {}).items():
                if how != "eager":
                    verdicts.counts.update(_counts(part))
                    if _fault(part, expected[variant]):
                        suspected.setdefault(program, []).append((variant, number, part))
        part = machines[1][program][again[program], recall]
        if isinstance(part, str) or part[0]["traced"] or not part[0]["recalled"]:
            verdicts.traced[program.name] = "" if isinstance(part, str) else str(part[0]["refused"])
        else:
            verdicts.recalled.append(program.name)
    # torch does not guard all that it reads: a fault that it has without recall is not ours.
    without = fleet.run(
        {each: sorted({(variant, "off") for variant, *_ in suspected[each]}) for each in suspected}
    )
    for program, parts in suspected.items():
        for variant, number, part in parts:
            right = machines[0][program][variant, "eager"]
            if why := _fault(part, without[program][variant, "off"], right):
                verdicts.wrong.append(f"{program.name}: {variant} on machine {number}: {why}")
            elif variant != "AB":
                verdicts.broken.append(f"{program.name}: {variant}: {part}")
    return verdicts


def _counts(part: Any) -> dict[str, int]:
    last = part[-1] if isinstance(part, list) else {}
    return {name: count for name, count in last.items() if isinstance(count, int)}


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
