"""Run a program in child processes, and follow it by the records that they write.

:func:`check_program` finds out which graphs of a program can be cached, and :func:`warm` runs a job
until the remote has what it compiles: both read the lookups that its processes record in the local
tier (:mod:`s3cache.records`), and their progress where :data:`s3cache.settings.WATCHED` is set.
:func:`bench` times a user's own bucket, and a first step compiled and hit through it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from s3cache.entries import name_prefix
from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    TransientError,
    UnsupportedTorchError,
)
from s3cache.graph import BypassReason, Component, Graph, GraphBreak, Report
from s3cache.manage._bulk import Place, open_place, url_of
from s3cache.records import JOB, Record, Run, job_here, read_run, run_names
from s3cache.settings import WATCHED, Settings
from s3cache.store import FileLocation, MemoryLocation, Store, parse_url
from s3cache.tier import background
from s3cache.torch_api import installed_version, internals

__all__ = ["End", "bench", "check_program", "warm"]

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
) -> tuple[End, _Look]:
    """Run a command with the cache on in all its processes, as one job; return how it ended.

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
    look = _Look()
    try:
        while True:
            exit_code, runs = process.poll(), []
            for name in names():
                if name not in before:
                    with suppress(OSError, ConfigError):  # it was removed in the meantime
                        runs.append(read_run(root, name))
            look = _Look(runs, exit_code)
            end = enough(look)
            if exit_code is not None:
                return "itself", look
            if end is not None:
                return end, look
            if time.monotonic() > deadline:
                return "timeout", look
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    except KeyboardInterrupt:
        return "interrupted", look
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

    def enough(look: _Look) -> End | None:
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
        end, look = _watch(command, root, environment, enough, timeout_s, to_stderr=to_stderr)
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
    return tuple(_graph(same[0], refused.get(same[0].key), len(same)) for same in found.values())


def _graph(first: Record, refusal: Record | None, times: int) -> Graph:
    size = re.search(r"(\d+) nodes", first.components.get("gm", ("", ""))[1])
    reasons: Any = (refusal or first).reasons
    return Graph(
        nodes=int(size[1]) if size else 0,
        key=None if refusal else first.key or None,
        components={name: Component(*pair) for name, pair in first.components.items()},
        reasons=tuple(BypassReason(**each) for each in reasons),
        where=first.where,
        times=times,
    )


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
    left = 0

    def enough(look: _Look) -> End | None:
        nonlocal left
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
        end, look = _watch(command, settings.local_dir, environment, enough, timeout_s)
    counts = Counter(each.outcome for each in look.lookups)
    is_done = end not in ("timeout", "interrupted") and not look.exit_code and not left
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
    return bool(key) and await anext(place.store.list(name_prefix(key)), None) is not None


# -- measuring a bucket


_PREFIX = "s3cache-bench-"
_SMALL_BYTES = 4 << 10
_SMALL_TRIES = 20
_LARGE_TRIES = 3

# What a fresh process runs; it ends with a line of JSON.
_FIRST_STEP = """
import json, sys, time
import torch
import s3cache
cache = s3cache.enable()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 8)).to(device)
batch = torch.ones(16, 64, device=device)
started = time.perf_counter()
torch.compile(model)(batch).square().sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
step_s = time.perf_counter() - started
report = cache.flush(60)
stats = cache.stats()
print(json.dumps({
    "step_s": step_s, "device": device, "hits": sum(stats.hits.values()),
    "misses": {str(reason): count for reason, count in stats.misses.items()},
    "bypasses": dict(stats.bypass_reasons), "to_upload": report.remaining,
}), file=sys.__stdout__)
"""


def bench(
    url: str | None, *, size: int, rounds: int, timeout_s: float, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Time requests one by one, and the first step of a small model, compiled and hit.

    All objects are written below a new prefix, ``s3cache-bench-…/`` below the URL's, and are
    removed at the end if the credentials may. Tries that do not fit into ``timeout_s`` are left
    out. With no ``rounds``, each a cold and a warm start in fresh processes, torch is not needed.

    Returns:
        Plain data: ``url``, ``prefix``, ``storage`` with the times of each kind of request,
        ``warm_start`` if there were rounds, and how many objects were ``removed`` and are ``left``.
    """
    prefix = f"{_PREFIX}{secrets.token_hex(6)}/"
    below = _below(url_of(Settings.load(url)[0]), prefix)
    deadline = time.monotonic() + timeout_s
    with open_place(below, to_fill=True) as place:
        found: dict[str, Any] = {"url": place.store.url, "prefix": prefix}
        try:
            found["storage"] = _time_storage(place.store, size, deadline, advance)
            if rounds:
                found["warm_start"] = _time_starts(below, rounds, deadline, advance)
        finally:  # however it ends, also by Ctrl-C
            found["removed"], found["left"] = background().wait(_clean(place.store), None)
            location = parse_url(below)
            if isinstance(location, FileLocation):
                shutil.rmtree(location.path, ignore_errors=True)
    return found


async def _clean(store: Store) -> tuple[int, int]:
    """Remove what was written, and return how many objects are gone, and how many are left."""
    names = [info.key async for info in store.list()]
    for gone, name in enumerate(names):
        try:
            await store.delete(name)
        except AccessDeniedError:
            return gone, len(names) - gone
    return len(names), 0


def _below(url: str, prefix: str) -> str:
    """Return the URL of ``prefix`` below ``url``, which has to exist."""
    location = parse_url(url)
    if isinstance(location, MemoryLocation):
        raise ConfigError("the store", "is of this process alone", "give the URL of a bucket")
    parts = urlsplit(url)
    parts = parts._replace(path=f"{parts.path.rstrip('/')}/{prefix.rstrip('/')}")
    if isinstance(location, FileLocation):
        if not (location.create or os.path.isdir(location.path)):
            raise MissingContainerError(f"there is no directory {location.path}", op="bench")
        parts = parts._replace(query="create=true")
    return parts.geturl()


def _time_storage(
    store: Store, size: int, deadline: float, advance: Callable[[int], object]
) -> dict[str, dict[str, Any]]:
    def timed(call: Callable[[int], Coroutine[Any, Any, object]], size: int = 0) -> dict[str, Any]:
        """Try at least once, and again while ten more tries would fit into the time left."""
        seconds: list[float] = []
        for number in range(_LARGE_TRIES if size else _SMALL_TRIES):
            if seconds and deadline - time.monotonic() < 10 * seconds[-1]:
                break
            started = time.perf_counter()
            background().wait(call(number), None)
            seconds.append(time.perf_counter() - started)
            advance(1)
        times: dict[str, Any] = {"median_s": median(seconds), "seconds": seconds}
        if size:
            times |= {"bytes": size, "mb_s": size / max(times["median_s"], 1e-9) / 1e6}
        return times

    small, large = os.urandom(_SMALL_BYTES), os.urandom(size)
    background().wait(store.get("first"), None)  # which connects, and finds credentials
    return {
        "small_put": timed(lambda i: store.put(f"small-{i}", small)),
        "small_get": timed(lambda i: store.get(f"small-{i}")),
        "miss": timed(lambda i: store.get(f"absent-{i}")),
        "large_put": timed(lambda i: store.put(f"large-{i}", large), size),
        "large_get": timed(lambda i: store.get(f"large-{i}"), size),
    }


def _time_starts(
    url: str, rounds: int, deadline: float, advance: Callable[[int], object]
) -> dict[str, Any]:
    cold: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    for number in range(rounds):
        started = time.monotonic()
        for steps, recache in ((cold, True), (warm, False)):
            steps.append(_first_step(url, recache, deadline - time.monotonic()))
            advance(1)
        now = time.monotonic()
        if number + 1 < rounds and deadline - now < 1.5 * (now - started):
            break
    seconds = [[float(each["step_s"]) for each in steps] for steps in (cold, warm)]
    times = [{"median_s": median(each), "seconds": each} for each in seconds]
    return {
        **{name: warm[-1][name] for name in ("device", "hits", "misses", "bypasses")},
        **dict(zip(("cold", "warm"), times, strict=True)),
        "ratio": median(seconds[0]) / median(seconds[1]),
        "to_upload": cold[-1]["to_upload"],
    }


def _first_step(url: str, recache: bool, timeout_s: float) -> dict[str, Any]:
    """Return what a fresh process on an empty disk says of its first step."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as empty:
        ours = {
            "S3CACHE_URL": url,
            "S3CACHE_LOCAL_DIR": os.path.join(empty, "local"),
            "S3CACHE_MODE": "read-write",
            "S3CACHE_SHAPE_PROFILE": "0",
            "S3CACHE_RECACHE": str(int(recache)),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(empty, "inductor"),
            "TRITON_CACHE_DIR": os.path.join(empty, "triton"),
        }
        try:
            done = subprocess.run(  # noqa: S603 - ourselves
                [sys.executable, "-W", "ignore", "-c", _FIRST_STEP],
                env={**os.environ, **ours},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(timeout_s, 1.0),
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = "the first step did not end in time: raise --timeout"
            raise TransientError(problem) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError("the first step", f"cannot be made ({last})", "see s3cache doctor")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
