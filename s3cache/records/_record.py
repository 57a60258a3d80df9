"""What a run consists of, as plain data, and the recorder that writes it in the background."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import secrets
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from s3cache.errors import ConfigError
from s3cache.stats import TransferEvent
from s3cache.store import Directory
from s3cache.util.logs import logger_of

#: Longer lines are left out of a file of records.
MAX_LINE_BYTES = 512 << 10
# Transfers under way that are remembered at most: an end may never be reported.
_OPEN_AT_MOST = 10_000

_R = TypeVar("_R", "Record", "Event")


@dataclass(frozen=True)
class Record:
    """The outcome of one lookup.

    Attributes:
        level: ``aot`` for a whole graph, ``fx`` for an FX graph of a forward or backward.
        outcome: ``hit``, ``miss`` or ``bypass``.
        key: what was looked up; ``""`` where there is none.
        reason: why it missed; of a hit, the tier that had it.
        time: Unix time of the end.
        elapsed_s: how long it took.
        saved_s: of a hit, how long compiling it took where it was compiled.
        where: file, line and function that called what was compiled, outside of torch.
        of_whole: whether it is an FX graph of a whole graph that was looked up before.
        components: what the key is made of, by name: the digest and a readable value.
        parts: of a miss, the details of components, where their value does not show them.
        rejected: of a miss, why each entry under the key was not used, each in a line.
        reasons: why it was bypassed: code, message, fix, and the line in the user's program.
    """

    level: str
    outcome: str
    key: str = ""
    reason: str = ""
    time: float = 0.0
    elapsed_s: float = 0.0
    saved_s: float = 0.0
    where: tuple[str, int, str] | None = None
    of_whole: bool = False
    components: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    reasons: tuple[Mapping[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields that are not empty, as JSON can hold them."""
        return _not_empty(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Return the record that :meth:`as_dict` gave; unknown fields are left out.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        return _from_dict(cls, data)


@dataclass(frozen=True)
class Event:
    """Something that took a while.

    Attributes:
        event: ``download``, ``upload``, ``compile`` or ``save``.
        time: Unix time of the end.
        elapsed_s: how long it took.
        name: the object or key that it was about.
        size: bytes, as far as known.
        ended: ``done``, ``absent`` or ``failed``.
    """

    event: str
    time: float
    elapsed_s: float
    name: str = ""
    size: int = 0
    ended: str = "done"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields that are not empty, as JSON can hold them."""
        return _not_empty(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """Return the event that :meth:`as_dict` gave; unknown fields are left out.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        return _from_dict(cls, {"elapsed_s": 0.0, **data})


def _not_empty(record: Record | Event) -> dict[str, Any]:
    return {each.name: value for each in fields(record) if (value := getattr(record, each.name))}


def _from_dict(kind: type[_R], data: Mapping[str, Any]) -> _R:
    given = {each.name: (each, data[each.name]) for each in fields(kind) if each.name in data}
    return kind(**{name: _READ[str(each.type)](value) for name, (each, value) in given.items()})


# How a field of a type is read from JSON, which others may have written: as that type, or not.
_READ: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[str, int, str] | None": lambda value: (str(value[0]), int(value[1]), str(value[2])),
    "tuple[str, ...]": lambda value: tuple(map(str, value)),
    "tuple[Mapping[str, str], ...]": lambda value: tuple(map(_texts, value)),
    "Mapping[str, Mapping[str, str]]": lambda value: {
        str(name): _texts(texts) for name, texts in value.items()
    },
    "Mapping[str, tuple[str, str]]": lambda value: {
        str(name): (str(digest), str(text)) for name, (digest, text) in value.items()
    },
}


def _texts(value: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()}


@dataclass(frozen=True)
class Run:
    """The lookups of one process, the oldest first.

    Attributes:
        name: what ``--run`` takes.
        program: the script that it ran, as it was called.
        file: the whole path of that script.
        module: the name of the module, if ``-m`` ran it.
        started: Unix time.
        rank: of a distributed job, if it is one.
        complete: whether all its lookups are here; a very long run has more.
        job: the job of the process, as its environment named it, see :func:`in_jobs`.
        pid, parent: of the process.
        events: what else took time beside lookups.
        compiling: whether it was compiling at its last note; only of a process that is watched, as
            the following.
        noted: Unix time of that note; 0 for never.
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


class Transfers:
    """Make an event of each upload and download from its steps; any thread may report them.

    Args:
        add: is called with each event when the transfer has ended.
    """

    def __init__(self, add: Callable[[Event], None]) -> None:
        self._add = add
        self._began: dict[tuple[str, str], float] = {}

    def note(self, step: TransferEvent) -> None:
        """Take one step; a transfer that is tried again begins again."""
        which = step.direction, step.name
        if step.step == "started":
            if len(self._began) < _OPEN_AT_MOST:
                self._began[which] = time.time()
        elif step.step in ("done", "absent", "failed"):
            began = self._began.pop(which, None)
            if began is not None:
                now = time.time()
                took = max(now - began, 0.0)
                self._add(Event(step.direction, now, took, step.name, step.size, step.step))


class Lanes:
    """Assign each of many spans a lane in which it overlaps no other.

    Spans may come in any order; in that of their beginning they take as many lanes as there were
    spans at once.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []  # by lane

    def take(self, began: float, ended: float) -> int:
        """Return the lane of a span, counted from 0."""
        free = next((lane for lane, end in enumerate(self._ends) if end <= began), len(self._ends))
        self._ends[free : free + 1] = [ended]
        return free


# -- writing


logger = logger_of("records")

DIRECTORY = "records"
SUFFIX = ".jsonl"
#: The variable that names a job, whatever launches it.
JOB = "S3CACHE_JOB"
#: How a job begins that has its name from there, and one that a launcher of ranks started.
NAMED, _LAUNCHED = "job:", "ranks:"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC

# Records in memory: for questions of this process, and while the disk hangs.
_HELD_RECORDS = 512
_QUEUED_RECORDS = 512
_QUEUED_EVENTS = 256
# PATH_MAX of Linux: longer names are left out, so that the head of a run stays short.
_NAMED_CHARACTERS = 4096


@dataclass(frozen=True)
class RecordLimits:
    """Bounds of what is kept on the disk.

    Attributes:
        run_records, run_bytes: of one process.
        run_events: how many transfers, compiles and saves of one process.
        runs, all_bytes: of all together; a process that begins to write removes older runs.
    """

    run_records: int = 4096
    run_bytes: int = 8 << 20
    run_events: int = 4096
    runs: int = 128
    all_bytes: int = 64 << 20


def job_here() -> str:
    """Return the job that the environment names for this process; ``""`` if there is none."""
    if name := os.environ.get(JOB):
        return f"{NAMED}{name}"
    if "RANK" not in os.environ:
        return ""
    # As torchrun and similar launchers set them. Several jobs after one another may share all of
    # them: in_jobs tells those apart by their parent process and by repeated ranks.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return f"{_LAUNCHED}{' '.join(os.environ.get(name, '') for name in names)}"


_numbers = itertools.count()


class Recorder:
    """Keep the last lookups of this process, and append each to the run's file.

    Any thread may use it. The file is made with the first lookup, so a process that compiles
    nothing leaves none. A process that is killed has written all but what it looked up in its last
    moment. Where the disk fails or hangs nothing more is written, and the program does not wait.

    Args:
        root: the directory of the local tier, which is private to this user; ``None`` for memory
            alone.
    """

    def __init__(self, root: str | None, limits: RecordLimits | None = None) -> None:
        self._limits = limits or RecordLimits()
        # In the order of their names, also where a process makes several in a second.
        number, random = next(_numbers), secrets.token_hex(2)
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number:02x}{random}"
        self._root = root
        self._started = time.time()
        self._held: deque[Record] = deque(maxlen=_HELD_RECORDS)
        self._mutex = threading.Lock()
        self._queue: queue.Queue[Record | Event | dict[str, Any] | None] = queue.Queue(
            _QUEUED_RECORDS
        )
        self._thread: threading.Thread | None = None
        self._closed = root is None

    def add(self, record: Record | Event) -> None:
        """Keep ``record`` without waiting for the disk.

        An event is only written to the disk, and does not start a file as a lookup does.
        """
        if isinstance(record, Record):
            self._held.append(record)
        self._put(record)

    def note(self, **values: object) -> None:
        """Record the program's progress; replaces the previous note."""
        self._put(values)

    def _put(self, record: Record | Event | dict[str, Any]) -> None:
        if self._closed:
            return
        if isinstance(record, Event) and self._queue.qsize() >= _QUEUED_EVENTS:
            return  # leave room for lookups
        with contextlib.suppress(queue.Full):  # the disk hangs
            self._queue.put_nowait(record)
        if self._thread is None and not isinstance(record, Event):
            with self._mutex:
                if self._thread is None and not self._closed:
                    thread = threading.Thread(
                        target=self._work, name="s3cache-records", daemon=True
                    )
                    with contextlib.suppress(RuntimeError):  # there are no more threads
                        thread.start()
                        self._thread = thread

    def held(self) -> tuple[Record, ...]:
        """Return the last lookups of this process, the oldest first."""
        return tuple(self._held)

    def close(self, timeout_s: float) -> None:
        """Write all of it within ``timeout_s``; later lookups are kept in memory alone."""
        with self._mutex:
            self._closed = True
            thread = self._thread
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                thread.join(max(timeout_s, 0.0))

    # -- on the thread

    def _work(self) -> None:
        try:
            self._write_all()
        except (OSError, ConfigError, ValueError) as exc:
            logger.info("lookups are not recorded any more: %s", exc)
        self._closed = True

    def _write_all(self) -> None:
        assert self._root is not None
        directory = Directory.at(self._root).enter(DIRECTORY, make=True)
        _make_room(directory, self._limits)
        fd = os.open(f"{self.run}{SUFFIX}", _NEW, 0o600, dir_fd=directory.fd)
        try:
            os.write(fd, _line(self._head()))
            size = count = events = 0
            while (record := self._queue.get()) is not None:
                if isinstance(record, Event):
                    events += 1
                    if events <= self._limits.run_events:
                        os.write(fd, _line(record.as_dict()))
                    continue
                line = _line(_packed(record.as_dict()) if isinstance(record, Record) else record)
                size += len(line)
                count += 1
                if count > self._limits.run_records or size > self._limits.run_bytes:
                    os.write(fd, _line({"more": True}))
                    return
                if len(line) <= MAX_LINE_BYTES:
                    os.write(fd, line)
        finally:
            os.close(fd)

    def _head(self) -> dict[str, object]:
        """Return the fields of the run as a whole; arguments of the program may be secrets."""
        main = sys.modules.get("__main__")
        file = str(getattr(main, "__file__", None) or "<none>")
        names = {
            "file": "" if file.startswith("<") else os.path.realpath(file),
            "module": getattr(getattr(main, "__spec__", None), "name", None) or "",
        }
        return {
            "run": self.run,
            "program": sys.argv[0] if sys.argv else "",
            **{what: name for what, name in names.items() if 0 < len(name) <= _NAMED_CHARACTERS},
            "started": self._started,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "job": job_here(),
            "rank": os.environ.get("RANK", ""),
        }


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode() + b"\n"


def _packed(record: dict[str, Any]) -> dict[str, Any]:
    """Compress the parts, mostly code and shapes, to about a tenth."""
    if parts := record.get("parts"):
        plain = json.dumps(parts, separators=(",", ":"), default=str).encode()
        record["parts"] = base64.b85encode(zlib.compress(plain, 1)).decode()
    return record


def _make_room(directory: Directory, limits: RecordLimits) -> None:
    """Remove the oldest runs: names begin with the time."""
    with directory.scan() as entries:
        runs = sorted(
            ((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries),
            reverse=True,
        )
    total = 0
    for index, (name, size) in enumerate(runs):
        total += size
        if index >= limits.runs - 1 or total > limits.all_bytes - limits.run_bytes:
            with contextlib.suppress(OSError):  # another process has removed it, or it is no file
                os.unlink(name, dir_fd=directory.fd)
