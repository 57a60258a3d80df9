"""Records of lookups: local, private and bounded, to explain misses later.

A process writes one file in ``records/`` of its local tier, with a line of JSON for each lookup.
Records never leave the machine. Without a local tier, the process keeps them in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from s3cache.errors import ConfigError
from s3cache.seam import launch
from s3cache.stats import TransferEvent
from s3cache.store import Directory
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logger_of("records")

#: The variable that names a job, with any launcher.
JOB = "S3CACHE_JOB"
_NAMED, _LAUNCHED = "job:", "launcher:"  # from this variable, or from a launcher
_DIRECTORY = "records"
_SUFFIX = ".jsonl"

# Records in memory: for this process, and while the disk hangs.
_HELD_RECORDS = _QUEUED_RECORDS = 512


@dataclass(frozen=True)
class _Line:
    """One line of the file of a run."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields that are not empty, in types of JSON."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make a line from the result of :meth:`as_dict`; ignore unknown fields."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: _with_tuples(data[name]) for name in names & data.keys()})


def _with_tuples(value: Any) -> Any:
    """Convert lists to tuples: JSON has no tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Record(_Line):
    """The outcome of one lookup of ``key``, which took ``elapsed_s`` until ``time`` (Unix)."""

    kind: str  # ``aot`` for a whole graph, ``fx`` for an FX graph of a forward or backward
    outcome: str  # ``hit``, ``miss`` or ``bypass``
    key: str = ""
    reason: str = ""  # of a miss, its reason; of a hit, the tier
    time: float = 0.0
    elapsed_s: float = 0.0
    saved_s: float = 0.0  # of a hit, how long the graph took to compile originally
    where: tuple[str, int, str] | None = None  # file, line and function of the call
    of_whole: bool = False  # an FX graph of a whole graph that was looked up before
    # Of the key, by name: the digest and a readable value; of a miss, details that it lacks.
    components: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)  # of features; see Feature.reports
    rejected: tuple[str, ...] = ()  # of a miss, why each entry under the key was not used
    # Of a bypass: code, message, fix, and the line in the user's program.
    reasons: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Event(_Line):
    """A ``download``, ``upload``, ``compile`` or ``save`` of ``name`` that ended at ``time``.

    Or the name of a feature's event, with an object of it and its outcome: ``refused: CODE`` for
    one that a user may be able to fix.
    """

    event: str
    time: float
    elapsed_s: float = 0.0
    name: str = ""
    size: int = 0
    ended: str = "done"


@dataclass(frozen=True)
class Run:
    """The lookups of one process, oldest first; times are Unix times, 0 for never."""

    name: str  # for ``s3cache explain``
    records: tuple[Record, ...]
    program: str = ""  # the script as it was called
    started: float = 0.0
    process: str = ""  # its name in the job: a word and a number
    complete: bool = True  # a very long run has more lookups
    job: str = ""  # the job in its environment, see :func:`in_jobs`
    pid: int = 0
    parent: int = 0
    events: tuple[Event, ...] = ()
    compiling: bool = False  # at its last note; only for a watched process
    noted: float = 0.0
    breaks: tuple[Mapping[str, str], ...] = ()  # graph breaks, with places and reasons
    file: str = ""  # the full path of the script
    module: str = ""  # its name, if ``-m`` ran it


# -- writing


@dataclass(frozen=True)
class RecordLimits:
    """Limits on the records on the disk: of one process, and of all together."""

    run_bytes: int = 8 << 20
    runs: int = 128
    all_bytes: int = 64 << 20


def job_here() -> str:
    """Return the job of this process according to the environment; ``""`` if there is none."""
    if name := os.environ.get(JOB):
        return f"{_NAMED}{name}"
    # A launcher may give successive jobs the same text: in_jobs tells them apart by the parent
    # process and by repeated names of processes.
    here = launch()
    return f"{_LAUNCHED}{here.job}" if here.number else ""


_numbers = itertools.count()


class Recorder:
    """Keeps the last lookups of this process, and appends them to a file in ``root``, if given.

    Any thread may use it. A process that compiles nothing writes no file. A process that is killed
    loses only its very last lookups. If the disk fails or hangs, nothing more is written, and the
    program does not wait.
    """

    def __init__(self, root: str | None, limits: RecordLimits | None = None) -> None:
        self._root, self._limits, self._started = root, limits or RecordLimits(), time.time()
        # Names sort by time, even if a process makes several in a second.
        number = f"{next(_numbers):02x}{secrets.token_hex(2)}"
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}"
        self._held: deque[Record] = deque(maxlen=_HELD_RECORDS)
        self._began: dict[tuple[str, str], float] = {}  # start times of running transfers
        self._mutex = threading.Lock()
        self._queue = queue.Queue[Record | Event | dict[str, Any] | None](_QUEUED_RECORDS)
        self._thread: threading.Thread | None = None
        self._closed = root is None

    def add(self, record: Record | Event | dict[str, Any]) -> None:
        """Keep ``record`` without waiting for the disk; an event alone starts no file.

        A mapping is a note on the program's progress, and replaces the previous note.
        """
        if isinstance(record, Record):
            self._held.append(record)
        is_event = isinstance(record, Event)
        if self._closed or (is_event and self._queue.qsize() >= _QUEUED_RECORDS // 2):
            return  # leave room for lookups
        with contextlib.suppress(queue.Full):  # the disk hangs
            self._queue.put_nowait(record)
        if is_event:
            return
        with self._mutex, contextlib.suppress(RuntimeError):  # no more threads can start
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._work, name="s3cache-records", daemon=True)
                thread.start()
                self._thread = thread

    def record_transfer(self, step: TransferEvent) -> None:
        """Record an ended upload or download as an event; a retry starts a new one."""
        which = step.direction, step.name
        if step.step == "started":
            self._began[which] = time.time()
        elif step.step in ("done", "absent", "failed"):
            now = time.time()
            if (began := self._began.pop(which, None)) is not None:
                took = max(now - began, 0.0)
                self.add(Event(step.direction, now, took, step.name, step.size, step.step))

    def held(self) -> tuple[Record, ...]:
        """Return the last lookups of this process, oldest first."""
        return tuple(self._held)

    def close(self, timeout_s: float) -> None:
        """Write all records within ``timeout_s``; later ones are kept in memory only."""
        with self._mutex:
            self._closed = True
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                self._thread.join(max(timeout_s, 0.0))

    def _work(self) -> None:
        try:
            self._write_all()
        except (OSError, ConfigError, ValueError) as exc:
            logger.info("lookups are no longer recorded: %s", exc)
        self._closed = True

    def _write_all(self) -> None:
        directory = Directory.at(self._root or "").enter(_DIRECTORY, make=True)
        _make_room(directory, self._limits)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(f"{self.run}{_SUFFIX}", flags, 0o600, dir_fd=directory.fd)
        with os.fdopen(fd, "wb", buffering=0) as file:
            file.write(_line(self._head()))
            size = 0
            while (record := self._queue.get()) is not None:
                line = _line(record if isinstance(record, dict) else record.as_dict())
                size += len(line)
                if size > self._limits.run_bytes:
                    file.write(_line({"more": True}))
                    return
                file.write(line)

    def _head(self) -> dict[str, object]:
        """Return the fields of the run, without arguments of the program: they may be secret."""
        main = sys.modules.get("__main__")
        file = str(getattr(main, "__file__", None) or "<none>")
        return {
            "run": self.run,
            "program": sys.argv[0] if sys.argv else "",
            "file": "" if file.startswith("<") else os.path.realpath(file),
            "module": getattr(getattr(main, "__spec__", None), "name", None) or "",
            "started": self._started,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "job": job_here(),
            "process": launch().name,
        }


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode() + b"\n"


def _make_room(directory: Directory, limits: RecordLimits) -> None:
    """Remove the oldest runs: names begin with the time."""
    with directory.scan() as entries:
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    total = 0
    for index, name in enumerate(sorted(sizes, reverse=True)):
        total += sizes[name]
        if index >= limits.runs - 1 or total > limits.all_bytes - limits.run_bytes:
            with contextlib.suppress(OSError):  # removed by another process, or no file
                os.unlink(name, dir_fd=directory.fd)


# -- reading


def run_names(root: str) -> list[str]:
    """Return the names of all runs that are recorded in a local tier, latest first.

    Like the functions below, raises OSError, and ConfigError for another user's directory.
    """
    try:
        directory = Directory.at(root).enter(_DIRECTORY)
    except FileNotFoundError:
        return []
    names = sorted(directory.names(), reverse=True)
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


def read_run(root: str, name: str, max_lines: int | None = None) -> Run:
    """Read a run, as far as it is written; ignore damaged or unfinished lines."""
    directory = Directory.at(root).enter(_DIRECTORY)
    fd = os.open(f"{name}{_SUFFIX}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory.fd)
    head: dict[str, Any] = {}
    lookups, events, breaks = list[Record](), list[Event](), list[Mapping[str, str]]()
    with os.fdopen(fd, "rb") as file:
        for line in itertools.islice(file, max_lines):
            with contextlib.suppress(AttributeError, RecursionError, TypeError, ValueError):
                value = json.loads(line)
                if "graph_break" in value:
                    breaks.append(value["graph_break"])
                elif "event" in value:
                    events.append(Event.from_dict(value))
                elif "outcome" in value:
                    lookups.append(Record.from_dict(value))
                else:
                    head.update(value)
    head |= {"noted": head.get("at", 0.0), "complete": "more" not in head, "name": name}
    head |= {"records": tuple(lookups), "events": tuple(events), "breaks": tuple(breaks)}
    return Run(**{each.name: head[each.name] for each in fields(Run) if each.name in head})


def recorded(
    roots: Iterable[str], is_wanted: Callable[[str], bool] = bool, *, heads: bool = False
) -> Iterator[Run]:
    """Yield the recorded runs in local tiers, latest first, as far as they can be read.

    ``is_wanted`` filters runs by name. With ``heads``, skip lookups and events, which is cheap.
    """
    places: dict[str, str] = {}
    for root in roots:
        with contextlib.suppress(OSError, ConfigError):
            places.update((name, root) for name in run_names(root))
    for name in filter(is_wanted, sorted(places, reverse=True)):
        with contextlib.suppress(OSError, ConfigError):  # removed meanwhile
            yield read_run(places[name], name, max_lines=1 if heads else None)


# -- jobs: the processes that a launcher has started, and their child processes


def in_jobs(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs by job, latest job first; inside a job sort by number, then by start."""
    jobs: list[list[Run]] = []
    open_jobs: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.name)):
        job = open_jobs.get(run.job) if run.job else None
        if job is None or not _belongs(run, job):
            job = []
            jobs.append(job)
            open_jobs[run.job] = job
        job.append(run)

    def number(run: Run) -> float:
        digits = run.process.rpartition(" ")[2]
        return int(digits) if digits.isdecimal() else math.inf

    return [sorted(job, key=number) for job in reversed(jobs)]


def _belongs(run: Run, job: Sequence[Run]) -> bool:
    if any(each.pid in (run.parent, run.pid) for each in job):
        return True  # a child process, or another cache in one of the processes
    if run.process and any(run.process == each.process for each in job):
        return False  # a later run of the same job
    return run.job.startswith(_NAMED) or any(run.parent == each.parent for each in job)


def processes_in_words(runs: Iterable[Run]) -> str:
    """Return the names of processes, as ``WORDs 0-7``; without a number, their process ids."""
    numbers, others = dict[int, str](), set[str]()
    for run in runs:
        word, _, number = run.process.rpartition(" ")
        if number.isdecimal():
            numbers[int(number)] = word  # equal in a job
        else:
            others.add(number or str(run.pid))
    spans = []
    for _, span in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        together = [str(number) for _, number in span]
        spans.append("-".join(together if len(together) < 3 else [together[0], together[-1]]))
    words = [f"{word}{'s' * (len(numbers) > 1)} {', '.join(spans)}" for word in {*numbers.values()}]
    words += [f"process{'es' * (len(others) > 1)} {', '.join(sorted(others))}"] if others else []
    return ", ".join(words)


def folded(runs: Iterable[Run]) -> list[tuple[Record, list[Run]]]:
    """Return the lookups of a job; merge those with the same outcome in several processes.

    A merged record has the longest time, and the sum of saved time.
    """
    equal: dict[tuple[object, ...], tuple[Record, list[Run]]] = {}
    for run in runs:
        times: Counter[tuple[object, ...]] = Counter()
        for record in run.records:
            ended = (record.kind, record.outcome, record.key, record.reason, record.where)
            messages = (reason.get("message") for reason in record.reasons)
            which = (*ended, record.rejected, *messages)
            times[which] += 1
            same = (times[which], *which)
            first, its_runs = equal.get(same, (replace(record, saved_s=0), []))
            slowest_s = max(first.elapsed_s, record.elapsed_s)
            both = replace(first, elapsed_s=slowest_s, saved_s=first.saved_s + record.saved_s)
            equal[same] = both, [*its_runs, run]
    return [*equal.values()]
