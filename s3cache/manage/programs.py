"""Run a program in a process of its own, and follow it through the records that it leaves.

:func:`check_program` finds out which graphs of a program can be cached, and :func:`warm` runs a job
until the remote has what it compiles. All its processes that have the cache leave their lookups in
the local tier (:mod:`s3cache.records`), and their progress where
:data:`s3cache.settings.WATCHED` is set.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from s3cache.entries import name_prefix
from s3cache.errors import ConfigError, UnsupportedTorchError
from s3cache.graph import BypassReason, Component, Graph, GraphBreak, Report
from s3cache.manage._bulk import Place, open_place, url_of
from s3cache.records import JOB, Record, Run, job_here, read_run, run_names
from s3cache.settings import WATCHED, Settings
from s3cache.store import listing
from s3cache.tier import background
from s3cache.torch_api import installed_version, internals

__all__ = ["End", "check_program", "warm"]

#: How a program ended: by itself; as it has done its steps, compiled so many graphs, or compiles
#: nothing more; out of time; by Ctrl-C.
End: TypeAlias = Literal["itself", "steps", "graphs", "quiet", "timeout", "interrupted"]

_POLL_S = 0.5
_TERMINATE_S = 30.0
_STDERR = 2
# A graph that missed and is not saved after so many times the quiet time never will be.
_UNSAVED_FACTOR = 10
_CALL_S = 30.0


@dataclass(frozen=True)
class _Look:
    """What the processes of a program have recorded so far, and its exit code once it has ended."""

    runs: Sequence[Run] = ()
    exit_code: int | None = None
    at: float = field(default_factory=time.time)

    @property
    def lookups(self) -> list[Record]:
        """Return the lookups of whole graphs."""
        return [each for run in self.runs for each in run.records if each.level == "aot"]

    @property
    def steps(self) -> int:
        """Return how often the optimizers of all processes that have any have stepped."""
        return min((run.steps for run in self.runs if run.steps), default=0)

    @property
    def quiet_s(self) -> float:
        """Return for how long nothing was compiled or looked up; -1 if nothing ever was.

        A process that was killed while it compiled does not count as compiling.
        """
        if any(run.compiling and _is_alive(run.pid) for run in self.runs):
            return 0.0
        times = [record.time for run in self.runs for record in run.records]
        return self.at - max([*times, *(run.noted for run in self.runs)]) if times else -1.0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return isinstance(exc, PermissionError)
    return pid > 0


def _watch(
    command: Sequence[str],
    root: str,
    environment: Mapping[str, str],
    enough: Callable[[_Look], End | None],
    timeout_s: float | None,
    *,
    to_stderr: bool = False,
) -> End:
    """Run a command with the cache on in all its processes, which are one job, and return its end.

    ``enough`` gets a look at it every half second, and once more when it has ended by itself; it
    returns why to end it, if at all. All processes that are left get SIGTERM, and after half a
    minute SIGKILL.
    """
    ours = {"S3CACHE_LOCAL_DIR": root, "S3CACHE_AUTOLOAD": "1", "S3CACHE_RECORD": "1", WATCHED: "1"}
    if not job_here():  # then each rank is one of a job already
        ours[JOB] = secrets.token_hex(4)

    def names() -> list[str]:
        with suppress(OSError, ConfigError):
            return run_names(root)
        return []

    before = {*names()}
    try:
        process = subprocess.Popen(  # noqa: S603 - it is what it was asked to run
            command,
            env={**environment, **ours},
            stdout=_STDERR if to_stderr else None,
            start_new_session=True,
        )
    except OSError as exc:
        cause = f"cannot be run ({exc.strerror})"
        raise ConfigError(f"command {command[0]}", cause, "give another") from None
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            exit_code = process.poll()
            runs = []
            for name in names():
                if name not in before:
                    with suppress(OSError, ConfigError):  # it was removed in the meantime
                        runs.append(read_run(root, name))
            end = enough(_Look(runs, exit_code))
            if exit_code is not None:
                return "itself"
            if end is not None:
                return end
            if time.monotonic() > deadline:
                return "timeout"
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_S)


def check_program(
    program: Sequence[str],
    *,
    quiet_s: float | None = None,
    steps: int | None = None,
    graphs: int | None = None,
    timeout_s: float | None = None,
    to_stderr: bool = False,
) -> Report:
    """Run ``program``, which is what follows ``python``, until it has shown enough.

    That is when it has compiled something and then nothing for ``quiet_s``, when its optimizers
    have stepped so often since it first compiled, when so many graphs were looked at, and after
    ``timeout_s``; None for never. It compiles as usual, with s3cache over a temporary local tier
    alone: each graph goes the whole way, to a saved entry or to the reasons why there is none.

    Raises:
        UnsupportedTorchError: nothing would be cached, for this torch is not supported.
        ConfigError: it cannot be run.
    """
    if not internals.is_supported():
        raise UnsupportedTorchError(
            f"torch {installed_version()} is not supported, so nothing of it is cached; use one "
            "that docs/compatibility.md names"
        )
    look = _Look()

    def enough(now: _Look) -> End | None:
        nonlocal look
        look = now
        if look.quiet_s < 0:
            return None
        if graphs is not None and len(_graphs(look.lookups)) >= graphs:
            return "graphs"
        if steps is not None and look.steps >= steps and look.quiet_s > 0:
            return "steps"
        return "quiet" if quiet_s is not None and look.quiet_s >= quiet_s else None

    environment = {k: text for k, text in os.environ.items() if not k.startswith("S3CACHE_")}
    environment |= {"S3CACHE_SUMMARY": "0", "S3CACHE_SHAPE_PROFILE": "0"}
    command = [sys.executable, "-m", "s3cache", "run", *program]
    with tempfile.TemporaryDirectory(prefix="s3cache-check-", ignore_cleanup_errors=True) as place:
        root = os.path.join(place, "local")
        try:
            end = _watch(command, root, environment, enough, timeout_s, to_stderr=to_stderr)
        except KeyboardInterrupt:
            end = "interrupted"
    runs = sorted(look.runs, key=lambda run: run.started)
    breaks = [GraphBreak(each["reason"], each["where"]) for run in runs for each in run.breaks]
    return Report(
        graphs=_graphs(_Look(runs).lookups),
        breaks=tuple(dict.fromkeys(breaks)),
        complete=all(run.complete for run in runs),
        program={"end": end, "exit_code": look.exit_code, "steps": look.steps},
    )


def _graphs(lookups: Sequence[Record]) -> tuple[Graph, ...]:
    """Return each graph once, with the reasons of one that was refused when it was saved."""
    refused: dict[str, Record] = {}
    found: dict[object, list[Record]] = {}
    for record in lookups:
        if record.outcome == "bypass" and record.key:
            refused[record.key] = record
        else:
            messages = tuple(each.get("message", "") for each in record.reasons)
            found.setdefault(record.key or (record.where, messages), []).append(record)
    graphs = []
    for first, *others in found.values():
        size = re.search(r"(\d+) nodes", first.components.get("gm", ("", ""))[1])
        refusal = refused.get(first.key)
        reasons: Any = (refusal or first).reasons
        graphs.append(
            Graph(
                nodes=int(size[1]) if size else 0,
                key=None if refusal else first.key or None,
                components={name: Component(*pair) for name, pair in first.components.items()},
                reasons=tuple(BypassReason(**each) for each in reasons),
                where=first.where,
                times=1 + len(others),
            )
        )
    return tuple(graphs)


def warm(
    command: Sequence[str],
    *,
    quiet_s: float,
    timeout_s: float,
    steps: int | None = None,
    url: str | None = None,
) -> dict[str, Any]:
    """Run ``command`` with the cache on until it has looked something up and then compiled nothing
    for ``quiet_s``, what missed is saved, and all is uploaded; then end all its processes.

    With ``steps`` it waits for so many steps of its optimizers instead of for ``quiet_s``. Those of
    a compiled optimizer cannot be seen, and inference has none: there ``quiet_s`` ends it.

    Returns:
        Plain data. Of the lookups of whole graphs that were ``misses``, so many were ``added``.

    Raises:
        ConfigError: the settings name no remote or no local tier, or there is no such program.
        StoreError: the local tier cannot be used.
    """
    settings, _ = Settings.load(url)
    environment = {**os.environ, "S3CACHE_URL": url_of(settings)}
    if not settings.local:
        raise ConfigError("the local tier", "is off", "leave S3CACHE_LOCAL out for this")
    saved: dict[str, bool] = {}
    look, left = _Look(), 0

    def enough(now: _Look) -> End | None:
        nonlocal look, left
        look = now
        for each in look.lookups:
            if each.outcome == "miss" and not saved.get(each.key):
                saved[each.key] = background().wait(_is_saved(place, each.key), _CALL_S)
        left = len(background().wait(place.to_upload(), _CALL_S))
        if left or not look.lookups:
            return None
        all_saved = all(saved.values())
        if steps is not None and look.steps >= steps and look.quiet_s > 0:
            return "steps" if all_saved or look.quiet_s >= quiet_s else None
        enough_s = quiet_s if all_saved else _UNSAVED_FACTOR * quiet_s
        return "quiet" if look.quiet_s >= enough_s else None

    with open_place(url, in_tier=True) as place:
        end = _watch(command, settings.local_dir, environment, enough, timeout_s)
    counts = Counter(each.outcome for each in look.lookups)
    is_done = end != "timeout" and not look.exit_code and not left
    return {
        "end": end,
        "exit_code": look.exit_code,
        "hits": counts["hit"],
        "misses": counts["miss"],
        "bypasses": counts["bypass"],
        "added": sum(saved.values()),
        "to_upload": left,
        "steps": look.steps,
        "is_warm": is_done and bool(counts),
    }


async def _is_saved(place: Place, key: str) -> bool:
    async with listing(place.store, name_prefix(key)) as objects:
        return bool(key) and await anext(objects, None) is not None
