"""Write lookups from a thread of its own, so that compiling never waits for a disk."""

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
from dataclasses import dataclass
from typing import Any

from s3cache.errors import ConfigError
from s3cache.records._record import MAX_LINE_BYTES, Event, Record
from s3cache.store import Directory
from s3cache.util.logs import logger_of

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
