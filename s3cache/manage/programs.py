"""Run a program in child processes, and follow it through the records that they write.

:func:`check_program` and :func:`warm` read the lookups that the processes record in the local tier
(:mod:`s3cache.records`), and their progress, which :data:`s3cache.settings.WATCHED` turns on.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from s3cache.errors import ConfigError, UnsupportedTorchError
from s3cache.graph import BypassReason, Component, Graph, GraphBreak, Report
from s3cache.manage._bulk import open_place, url_of
from s3cache.records import JOB, Record, Run, job_here, recorded
from s3cache.settings import WATCHED, Settings
from s3cache.tier import background
from s3cache.torch_api import installed_version, internals

#: How a program ended: by itself, after a quiet time, after enough graphs, by timeout, by Ctrl-C.
End: TypeAlias = Literal["itself", "quiet", "graphs", "timeout", "interrupted"]

_POLL_S = 0.5
_TERMINATE_S = _CALL_S = 30.0
# A graph that missed and is not saved within this many quiet times is given up.
_UNSAVED_FACTOR = 10


@dataclass(frozen=True)
class _Look:
    """The records of a program's processes so far, and its exit code once it has ended."""

    runs: Sequence[Run] = ()
    exit_code: int | None = None

    @property
    def lookups(self) -> list[Record]:
        """Return the lookups of whole graphs, and of those that have no whole graph to hit."""
        return [
            record
            for run in self.runs
            for record in run.records
            if record.kind == "aot" or (record.kind == "fx" and not record.of_whole)
        ]

    @property
    def missed(self) -> dict[str, bool]:
        """Return the keys of graphs that missed, and whether an entry was saved later."""
        saved = {event.name for run in self.runs for event in run.events if event.event == "save"}
        return {it.key: it.key in saved for it in self.lookups if it.outcome == "miss"}

    @property
    def is_saved(self) -> bool:
        """Whether all graphs that missed are saved, except those that cannot be."""
        refused = {record.key for record in self.lookups if record.outcome == "bypass"}
        return all(saved or key in refused for key, saved in self.missed.items())

    @property
    def quiet_s(self) -> float:
        """Return the time since the last compile or lookup; -1 if there was none.

        A process that was killed during a compile does not count as compiling.
        """
        if any(run.compiling and _is_alive(run.pid) for run in self.runs):
            return 0.0
        times = [record.time for run in self.runs for record in run.records]
        return time.time() - max([*times, *(run.noted for run in self.runs)]) if times else -1.0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return isinstance(exc, PermissionError)
    return True


def _watch(
    command: Sequence[str],
    root: str,
    environment: Mapping[str, str],
    enough: Callable[[_Look], End | None],
    timeout_s: float,
    *,
    to_stderr: bool = False,
) -> tuple[End, _Look]:
    """Run a command as one job with the cache on in all processes; return how it ended.

    ``enough`` is called with the records every half second, and once after the end; it returns a
    reason to end the job, or None. Remaining processes get SIGTERM, and SIGKILL 30 seconds later.
    """
    switches = ("S3CACHE_AUTOLOAD", "S3CACHE_RECORD", WATCHED)
    added = {"S3CACHE_LOCAL_DIR": root, **dict.fromkeys(switches, "1")}
    if not job_here():  # else the processes already belong to a job
        added[JOB] = secrets.token_hex(4)
    before = {run.name for run in recorded([root], heads=True)}
    try:
        process = subprocess.Popen(  # noqa: S603 - it is what it was asked to run
            command,
            env={**environment, **added},
            stdout=2 if to_stderr else None,
            start_new_session=True,
        )
    except OSError as exc:
        cause = f"cannot be run ({exc.strerror})"
        raise ConfigError(f"command {command[0]}", cause, "give another command") from None
    deadline = time.monotonic() + timeout_s
    look = _Look()
    try:
        while True:
            exit_code = process.poll()
            look = _Look([*recorded([root], lambda name: name not in before)], exit_code)
            end = enough(look)
            if exit_code is not None:
                return "itself", look
            if end is not None or time.monotonic() > deadline:
                return end or "timeout", look
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    except KeyboardInterrupt:
        return "interrupted", look
    finally:
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal_)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_S)


def check_program(
    program: Sequence[str],
    *,
    quiet_s: float,
    timeout_s: float,
    graphs: float = math.inf,
    to_stderr: bool = False,
) -> Report:
    """Run ``program``, the arguments of ``python``, and report which graphs can be cached.

    The run ends ``quiet_s`` after the last compile, after lookups of ``graphs`` graphs, or after
    ``timeout_s``; each may be infinite. The program compiles as usual, with a temporary local tier
    as its cache: every graph is saved, or has the reasons why it is not. Raises
    UnsupportedTorchError if nothing would be cached, ConfigError if the program cannot be run.
    """
    if not internals.is_supported():
        raise UnsupportedTorchError(
            f"torch {installed_version()} is not supported, so nothing is cached; use a release "
            "that docs/compatibility.md lists"
        )

    def enough(look: _Look) -> End | None:
        if look.quiet_s > 0 and len(_graphs(look.lookups)) >= graphs:
            return "graphs"
        return "quiet" if look.quiet_s >= quiet_s else None

    environment = {k: text for k, text in os.environ.items() if not k.startswith("S3CACHE_")}
    environment["S3CACHE_SUMMARY"] = "0"
    command = [sys.executable, "-m", "s3cache", "run", *program]
    with tempfile.TemporaryDirectory(prefix="s3cache-check-", ignore_cleanup_errors=True) as place:
        root = os.path.join(place, "local")
        end, look = _watch(command, root, environment, enough, timeout_s, to_stderr=to_stderr)
    runs = sorted(look.runs, key=lambda run: run.started)
    breaks = [GraphBreak(it["reason"], it["where"]) for run in runs for it in run.breaks]
    return Report(
        graphs=_graphs(_Look(runs).lookups),
        breaks=tuple(dict.fromkeys(breaks)),
        complete=all(run.complete for run in runs),
        program={"end": end, "exit_code": look.exit_code},
    )


def _graphs(lookups: Sequence[Record]) -> tuple[Graph, ...]:
    """Return each whole graph once, with the reasons if its save was refused."""
    refused: dict[str, Record] = {}
    by_graph: dict[object, list[Record]] = defaultdict(list)
    for record in (record for record in lookups if record.kind == "aot"):
        if record.outcome == "bypass" and record.key:
            refused[record.key] = record
        else:
            messages = tuple(reason.get("message", "") for reason in record.reasons)
            by_graph[record.key or (record.where, messages)].append(record)
    graphs = []
    for first, *others in by_graph.values():
        size = re.search(r"(\d+) nodes", first.components.get("gm", ("", ""))[1])
        refusal = refused.get(first.key)
        reasons: Any = (refusal or first).reasons
        graph = Graph(
            nodes=int(size[1]) if size else 0,
            key=None if refusal else first.key or None,
            components={name: Component(*pair) for name, pair in first.components.items()},
            reasons=tuple(BypassReason(**reason) for reason in reasons),
            where=first.where,
            times=1 + len(others),
        )
        graphs.append(graph)
    return tuple(graphs)


def warm(
    command: Sequence[str],
    *,
    quiet_s: float,
    timeout_s: float,
    url: str | None = None,
    environments: Iterable[AbstractContextManager[Mapping[str, str | None]]] = (),
) -> dict[str, Any]:
    """Run ``command`` with the cache on until all its entries are uploaded; then end the job.

    That is when it has compiled nothing for ``quiet_s`` after a lookup, and all missed graphs are
    saved and uploaded. ``environments`` yield more environment variables, or ``None`` for those
    that the job must not have. In the result, ``misses`` counts the missed lookups of graphs, at
    the second level if they are not cached as a whole, ``added`` those of them that were saved.

    Raises ConfigError if the remote, the local tier or the program is missing, and StoreError if
    the local tier cannot be used.
    """
    settings, _ = Settings.load(url)
    variables: dict[str, str | None] = {**os.environ, "S3CACHE_URL": url_of(settings)}
    if not settings.local:
        raise ConfigError("the local tier", "is off", "unset S3CACHE_LOCAL")
    left = 0

    def enough(look: _Look) -> End | None:
        nonlocal left
        left = len(background().wait(place.to_upload(), _CALL_S))
        enough_s = quiet_s if look.is_saved else _UNSAVED_FACTOR * quiet_s
        is_quiet = not left and look.lookups and look.quiet_s >= enough_s
        return "quiet" if is_quiet else None

    with open_place(url, in_tier=True) as place, ExitStack() as stack:
        for context in environments:
            variables |= stack.enter_context(context)
        environment = {name: value for name, value in variables.items() if value is not None}
        end, look = _watch(command, settings.local_dir, environment, enough, timeout_s)
    counts = Counter(record.outcome for record in look.lookups)
    is_done = end not in ("timeout", "interrupted") and not look.exit_code and not left
    return {
        "end": end,
        "exit_code": look.exit_code,
        "hits": counts["hit"],
        "misses": counts["miss"],
        "bypasses": counts["bypass"],
        "added": sum(look.missed.values()),
        "to_upload": left,
        "is_warm": is_done and bool(counts),
    }
