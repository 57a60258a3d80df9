"""Decide whether a candidate that fits may be used, and keep what traces say of it.

Two rules decide, besides the comparison of the frame. This must be the *program* that traced the
candidate (:mod:`.program`). And with ``recall="auto"``, two processes must have traced it alike;
now and then a process traces in spite of that, as a canary.

A candidate lists the processes that traced it. The facts of their programs are entries of their
own, which all frames of a program share. A trace with another result than a candidate that fits
leaves a *tombstone* under the key: what is written there is never used again, by any reader.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgpack  # type: ignore[import-untyped]

from s3cache.artifact import section_of
from s3cache.entries import LabelledKey, labelled_key
from s3cache.features.recall import KEYS, RecallOptions, dynamo
from s3cache.features.recall.candidate import KIND, Candidate, encoded
from s3cache.features.recall.program import Facts, Program, difference, digest_of_facts
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.cache import Engine
    from s3cache.frame import Frame

logger = logger_of("recall")

#: Why a candidate that fits is not used: another program, traced by one process only, a canary, an
#: accelerator on which recall has not been tested.
Objection: TypeAlias = Literal["program", "unconfirmed", "canary", "device"]
#: How many processes a candidate lists: the newest.
_MAX_TRACES: Final = 8
_PROGRAM, _TOMBSTONE = "program", "tombstone"


class Agreement:
    """The candidates that this process may use, and what its traces add to them.

    ``writes`` says whether this process may save what its traces add.
    """

    def __init__(self, engine: Engine) -> None:
        options = engine.settings.of(RecallOptions)
        self._engine = engine
        self.writes = engine.settings.mode in ("read-write", "write-only")
        self._traces_needed = 2 if options.recall == "auto" else 1
        self._is_canary = options.recall == "auto" and _is_canary_day(options.recall_canary)
        self._program = Program()
        # Facts of programs by digest, None if they cannot be found; and what was saved of them.
        self._facts: dict[bytes, Facts | None] = {}
        self._saved: set[bytes] = set()

    def look(self) -> bytes:
        """Look at the program as it is now; return the digest of its facts."""
        facts = self._program.facts()
        digest = digest_of_facts(facts)
        self._facts[digest] = facts
        return digest

    def objection(self, candidate: Candidate, program: bytes) -> tuple[Objection, str] | None:
        """Return why a candidate that fits is not used, also in words; None if it may be."""
        if why := self.other_program(candidate, program):
            return "program", why
        if len({process for process, *_ in candidate.traces}) < self._traces_needed:
            return "unconfirmed", "no other process has traced it yet"
        if self._traces_needed > 1 and dynamo.uses_accelerator():
            return "device", "recall has not been tested with an accelerator (recall=on uses it)"
        return ("canary", "this start is a canary") if self._is_canary else None

    def other_program(self, candidate: Candidate, program: bytes) -> str:
        """Return how the program differs from those that traced a candidate; ``""`` if not."""
        digests = [digest for *_, digest in candidate.traces]
        if program in digests:
            return ""
        recorded = [facts for digest in digests if (facts := self._facts_of(digest))]
        return difference(self._facts_of(program) or {}, recorded)

    def add(self, candidate: Candidate, program: bytes) -> bool:
        """List this process among those that traced ``candidate``; return False if it is there."""
        own = _name_of_process(os.getpid())
        if own in [process for process, *_ in candidate.traces]:
            return False
        traces = [*candidate.traces, [own, int(time.time()), program]]
        candidate.traces = traces[-_MAX_TRACES:]
        if program not in self._saved:
            self._saved.add(program)
            entry = encoded(key := _key_of(program), _PROGRAM, self._facts_of(program))
            self._engine.save(key, entry, kind=KIND)
        return True

    # -- programs

    def _facts_of(self, digest: bytes) -> Facts | None:
        if digest not in self._facts:
            self._facts[digest] = None
            with self._engine.candidates(_key_of(digest), KIND) as lookup:
                for hit in lookup:
                    try:
                        self._facts[digest] = msgpack.unpackb(
                            bytes(section_of(hit.entry, KIND, _PROGRAM))
                        )
                        lookup.accept(hit)
                        break
                    except Exception as exc:  # noqa: BLE001 - whatever it holds
                        lookup.reject(hit, exc)
        return self._facts[digest]

    # -- tombstones

    def bury(self, key: LabelledKey, old: Candidate, new: Candidate | None, why: str) -> str:
        """Let no process use ``old`` again; return the path of a file that says what differs."""
        if self.writes:
            content = {"condition": old.condition, "why": why, "when": int(time.time())}
            variant = hashlib.sha256(b"tombstone" + old.condition.encode()).hexdigest()[:32]
            self._engine.save(key, encoded(key, _TOMBSTONE, content, variant), kind=KIND)
        recorded, traced = ({} if each is None else asdict(each) for each in (old, new))
        differing = [name for name in recorded if recorded[name] != traced.get(name)]
        content = {
            "why": why,
            "key": key.components,
            "recorded": {name: repr(recorded[name]) for name in differing},
            "traced": {name: repr(traced.get(name)) for name in differing},
        }
        disk = self._engine.local.disk
        prefix = f"recall-{old.condition[:12]}-"
        handle, path = tempfile.mkstemp(".json", prefix, None if disk is None else disk.root)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        return path


@functools.cache
def _name_of_process(pid: int) -> bytes:
    """Return a random name; a fork has a number, and so a name, of its own."""
    return os.urandom(8)


def buried_condition(entry: Frame) -> str:
    """Return the condition that a tombstone buries; ``""`` for another entry."""
    if _TOMBSTONE not in entry.names:
        return ""
    return str(msgpack.unpackb(bytes(section_of(entry, KIND, _TOMBSTONE)))["condition"])


def _key_of(digest: bytes) -> LabelledKey:
    return labelled_key(KEYS, [("program", digest.hex())])


def _is_canary_day(one_in: int) -> bool:
    """Return whether a job traces all its frames today: so do all ranks of it, one day in many."""
    job = [os.path.basename(sys.argv[0] if sys.argv else ""), *sys.argv[1:]]
    text = repr([job, time.strftime("%Y-%m-%d", time.gmtime())])
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0
