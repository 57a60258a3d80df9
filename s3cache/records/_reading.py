"""Reading what processes of this machine have recorded."""

from __future__ import annotations

import base64
import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from s3cache.records._record import Event, Record
from s3cache.records._writing import DIRECTORY, SUFFIX
from s3cache.store import Directory

__all__ = ["Run", "read_head", "read_run", "run_names"]

# A pipe is not waited at for somebody to write.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 16 << 20
_MAX_PARTS_BYTES = 16 << 20
_HEAD_BYTES = 16 << 10
_N = TypeVar("_N", int, float)
_BAD = (AttributeError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Run:
    """The lookups of one process, the oldest first.

    Attributes:
        name: what ``--run`` takes.
        program: the script that it ran, as it was called.
        file: that script's whole path; older records lack it.
        module: its name, if ``-m`` ran it; older records lack it.
        started: Unix time.
        rank: of a distributed job, if it is one.
        complete: whether all its lookups are here; a very long run has more.
        job: what the environment said of the job that it was of, see :func:`in_jobs`.
        pid, parent: of the process.
        events: what else took time beside lookups.
        compiling: whether it compiled when it noted something last; only where it is watched, as
            the following.
        noted: when that was, Unix time; 0 for never.
        steps: how often each of its optimizers has stepped since it first compiled.
        breaks: where Dynamo broke graphs, and why.
    """

    name: str
    records: tuple[Record, ...]
    program: str = ""
    started: float = 0.0
    rank: str = ""
    complete: bool = True
    job: str = ""
    pid: int = 0
    parent: int = 0
    events: tuple[Event, ...] = ()
    compiling: bool = False
    noted: float = 0.0
    steps: int = 0
    breaks: tuple[Mapping[str, str], ...] = ()
    file: str = ""
    module: str = ""


def run_names(root: str) -> list[str]:
    """The names of all runs that are recorded in a local tier, the latest first.

    Raises:
        ConfigError: the directory may be another user's work.
        OSError: it cannot be read.
    """
    try:
        directory = Directory.at(root).enter(DIRECTORY)
    except FileNotFoundError:
        return []
    names = (name for name in directory.names() if name.endswith(SUFFIX))
    return [name.removesuffix(SUFFIX) for name in sorted(names, reverse=True)]


def read_run(root: str, name: str) -> Run:
    """That run, as far as it has got; a line that is damaged, or not whole yet, is left out.

    Raises:
        ConfigError: the directory may be another user's work.
        OSError: there is none of that name, or it cannot be read.
    """
    return _read(root, name, _MAX_BYTES)


def read_head(root: str, name: str) -> Run:
    """What is known of that run as a whole, without its lookups: cheap.

    Raises:
        ConfigError, OSError: as :func:`read_run`.
    """
    return replace(_read(root, name, _HEAD_BYTES), records=(), events=())


def _read(root: str, name: str, max_bytes: int) -> Run:
    directory = Directory.at(root).enter(DIRECTORY)
    fd = os.open(f"{name}{SUFFIX}", _OLD, dir_fd=directory.fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{name} is not a file of ours")
        with os.fdopen(os.dup(fd), "rb") as file:
            lines = file.read(max_bytes).split(b"\n")
    finally:
        os.close(fd)
    head: dict[str, Any] = {}
    records = []
    events = []
    breaks = []
    for line in lines:
        try:
            value = json.loads(line)
            if "outcome" in value:
                records.append(Record.from_dict(_unpacked(value)))
            elif "event" in value:
                events.append(Event.from_dict(value))
            elif "graph_break" in value:
                place = value["graph_break"]
                breaks.append({"reason": str(place["reason"]), "where": str(place["where"])})
            else:
                head.update(value)
        except (*_BAD, zlib.error):
            continue
    return Run(
        name=name,
        records=tuple(records),
        program=str(head.get("program", "")),
        started=_number(head, "started", float),
        rank=str(head.get("rank", "")),
        complete="more" not in head,
        job=str(head.get("job", "")),
        pid=_number(head, "pid", int),
        parent=_number(head, "parent", int),
        events=tuple(events),
        compiling=head.get("compiling") is True,
        noted=_number(head, "at", float),
        steps=_number(head, "steps", int),
        breaks=tuple(breaks),
        file=str(head.get("file", "")),
        module=str(head.get("module", "")),
    )


def _number(head: Mapping[str, Any], name: str, kind: type[_N]) -> _N:
    found = head.get(name)
    return found if isinstance(found, kind) else kind()


def _unpacked(record: dict[str, Any]) -> dict[str, Any]:
    if parts := record.get("parts"):
        plain = zlib.decompressobj().decompress(base64.b85decode(parts), _MAX_PARTS_BYTES)
        record["parts"] = json.loads(plain)
    return record
