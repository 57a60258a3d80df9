"""Writing what is looked up, from a thread of its own: who compiles waits for no disk."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import secrets
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from s3cache._logs import logger_of
from s3cache.errors import ConfigError
from s3cache.records._record import MAX_LINE_BYTES, Event, Record
from s3cache.store import Directory

__all__ = ["DIRECTORY", "JOB", "NAMED", "SUFFIX", "RecordLimits", "Recorder", "job_here"]

logger = logger_of("records")

DIRECTORY = "records"
SUFFIX = ".jsonl"
#: The variable that names a job, whoever launches it.
JOB = "S3CACHE_JOB"
#: How a job begins that has its name from there, and one that has none.
NAMED, _LAUNCHED = "job:", "ranks:"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC

# What a process holds in memory: for its own questions, and while the disk hangs.
_HELD_RECORDS = 512
_QUEUED_RECORDS = 512
_QUEUED_EVENTS = 256
# No path is longer (PATH_MAX of Linux), and the head of a run stays short.
_NAMED_CHARACTERS = 4096


@dataclass(frozen=True)
class RecordLimits:
    """How much is kept on the disk.

    Attributes:
        run_records, run_bytes: of one process.
        run_events: how many transfers, compiles and saves of one process.
        runs, all_bytes: of all together; older runs go when a process begins to write.
    """

    run_records: int = 4096
    run_bytes: int = 8 << 20
    run_events: int = 4096
    runs: int = 128
    all_bytes: int = 64 << 20


def job_here() -> str:
    """What the environment says of the job that this process is of; ``""`` if it is of none."""
    if name := os.environ.get(JOB):
        return f"{NAMED}{name}"
    if "RANK" not in os.environ:
        return ""
    # As torchrun and those that do as it does set them. Several jobs after one another may have
    # all of them in common: what tells those apart is who started them, and that a rank is one.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return f"{_LAUNCHED}{' '.join(os.environ.get(name, '') for name in names)}"


class Recorder:
    """Keeps the last lookups of this process, and appends each to the run's file.

    Any thread may use it. The file is made with the first lookup: who compiles nothing leaves
    none. A process that is killed has written all but what it looked up in its last moment; where
    the disk fails or hangs nothing more is written, and nobody waits for it.

    Args:
        root: the directory of the local tier, which is private to this user; ``None`` for memory
            alone.
    """

    def __init__(self, root: str | None, limits: RecordLimits | None = None) -> None:
        self._limits = limits or RecordLimits()
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}"
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
        """Keep ``record``: two calls of a queue, whatever the disk does.

        An event is for the disk alone, and makes no file: a lookup does.
        """
        if isinstance(record, Record):
            self._held.append(record)
        self._put(record)

    def note(self, **values: object) -> None:
        """Keep how far the program is, for who watches it; what it noted before is no more."""
        self._put(values)

    def _put(self, record: Record | Event | dict[str, Any]) -> None:
        if self._closed:
            return
        if isinstance(record, Event) and self._queue.qsize() >= _QUEUED_EVENTS:
            return  # there is to be room for lookups
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
        """The last lookups of this process, the oldest first."""
        return tuple(self._held)

    def close(self, timeout_s: float) -> None:
        """Have all of it written, within ``timeout_s``; later lookups are kept in memory alone."""
        with self._mutex:
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
            thread.join(max(timeout_s, 0.0))

    # -- on the thread

    def _work(self) -> None:
        try:
            self._write_all()
        except (OSError, ConfigError, ValueError) as exc:
            # People may want it later, and no program needs it now.
            logger.info("lookups are not recorded any more: %s", exc)
        self._closed = True

    def _write_all(self) -> None:
        assert self._root is not None
        directory = Directory.at(self._root).enter(DIRECTORY, make=True)
        _make_room(directory, self._limits)
        name = f"{self.run}{SUFFIX}"
        fd = os.open(name, _NEW, 0o600, dir_fd=directory.fd)
        try:
            os.write(fd, _line(self._head()))
            size = count = events = 0
            for record in self._queued():
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

    def _queued(self) -> Iterator[Record | Event | dict[str, Any]]:
        while (record := self._queue.get()) is not None:
            yield record

    def _head(self) -> dict[str, object]:
        # Arguments of the program may be secrets: nobody needs them.
        return {
            "run": self.run,
            "program": sys.argv[0] if sys.argv else "",
            **_main(),
            "started": self._started,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "job": job_here(),
            "rank": os.environ.get("RANK", ""),
        }


def _main() -> dict[str, str]:
    """The file that this process runs, wherever it has gone since, and its name after ``-m``."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    module = getattr(getattr(main, "__spec__", None), "name", None)
    named = {"module": module}
    if isinstance(file, str) and not file.startswith("<"):
        named["file"] = os.path.realpath(file)
    return {what: name for what, name in named.items() if name and len(name) <= _NAMED_CHARACTERS}


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode() + b"\n"


def _packed(record: dict[str, Any]) -> dict[str, Any]:
    """Parts are mostly code and shapes, which are a tenth when compressed."""
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
            with contextlib.suppress(OSError):  # somebody else has, or it is no file
                os.unlink(name, dir_fd=directory.fd)
