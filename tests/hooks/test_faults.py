"""A bug in s3cache costs a warning, never the user's program; strict mode raises it.

Only ``make test-all`` tests strict mode.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._functorch import config as functorch

import s3cache
from tests.hooks.jobs import account
from tests.support.marks import slow
from tests.support.processes import KEYS
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

HOOKS = ("key", "fx key", "lookup", "candidate", "rebuild", "save", "describe")
# Notes about a compile; an entry without them is never used.
NOTES = ("begin", "note fx", "note")
# torch keeps the graph in its own cache, and hits it there when s3cache works again.
MISS = {"torch miss": 1, "torch saved": 1, "miss fx": 2}


@slow
def test_without_strict_mode_no_fault_reaches_the_program(site: Site) -> None:
    """With a fault in any hook, results equal eager mode's, and the next compile works."""
    ran = site.machine("one").run("faults:faults", site.url, False)
    found, steps = ran["found"], ran["steps"]
    for name in (*HOOKS, *NOTES):
        assert found[name] is True, name
        assert found[name + " after"] is True, name
    for name in NOTES:
        assert "saved" not in steps[name]  # torch may keep it in its own directory
        assert steps[name + " after"]["saved"] == 1
    assert ran["stderr"].count("InjectedError: injected") >= 1

    # torch caches the graph under its own key.
    assert steps["key"] == {**MISS, "bypass": 1}
    assert steps["key after"]["saved"] == 1
    # The second level fails; the whole graph is saved anyway.
    assert steps["fx key"] == {**MISS, "miss": 1, "saved": 1}
    assert steps["lookup"] == {**MISS, "saved": 1}
    # An entry that could not be used is replaced by the fresh one.
    assert steps["candidate"] == steps["rebuild"] == {**MISS, "miss": 1, "saved": 1}
    assert steps["candidate after"] == steps["rebuild after"] == {"hit": 1, "torch hit": 1}
    for name in ("save", "describe"):
        assert steps[name] == {**MISS, "miss": 1}
        # torch has kept the graph that s3cache could not save.
        assert steps[name + " after"] == {"miss": 1, "torch hit": 1}


@slow
def test_strict_mode_raises_every_fault_and_every_bypass(site: Site) -> None:
    """It raises nothing else: the compile after each fault works."""
    ran = site.machine("one").run("faults:faults", site.url, True)
    found, bypassed = ran["found"], ran["bypassed"]
    for name in (*HOOKS, "begin", "note"):
        assert found[name].endswith(" True"), name
        assert found[name + " after"] is True, name
    assert ["opaque" in message for message in bypassed["raised"]] == [True, True]
    assert bypassed["product"] is True
    assert bypassed["reasons"] == {"function": 2}


# -- an entry that cannot be used is a miss with a reason, is set aside, and is replaced


@slow
def test_bad_entries_are_misses_and_are_replaced(site: Site) -> None:
    """Kernels that do not load, invalid pickles, graphs that cannot be rebuilt.

    Every frame is valid: the damage is inside, under correct digests.
    """
    ran = site.machine("one").run("graphs:damaged_and_replaced", site.url, "a")
    writer, reader, third = (ran[name] for name in ("writer", "reader", "third"))
    assert writer["wrong"] == reader["wrong"] == third["wrong"] == []
    count = writer["saved"]
    assert count == len(site.entries()) == 8

    assert reader["hits"] == {"local": 0, "remote": 0}
    assert reader["misses"] == {"corrupt": count}
    assert reader["torch"]["autograd_cache_miss"] == reader["saved"] == count
    assert "autograd_cache_hit" not in reader["torch"]
    assert "an entry cannot be used and is set aside" in ran["stderr"]
    assert ran["replaced"]

    assert third["hits"] == {"local": 0, "remote": count}
    assert third["torch"]["autograd_cache_hit"] == count
    assert third["time_saved_s"] > 0


# -- under any fault, a program trains as it would without the cache


# Far more than any fault may cost: torch has the graph on its own disk.
LONGEST_S = 60


@slow
def test_losses_and_gradients_are_the_same_under_each_fault(site: Site) -> None:
    results = site.machine("one").run("test_faults:under_faults", str(site.remote))
    stderr = results.pop("stderr")
    last = results.pop("none")
    assert set(results) == set(FAULTS)
    for name, noted in results.items():
        assert noted["right"], (name, noted, stderr)
        assert noted["seconds"] < LONGEST_S, (name, noted)
        assert sum(noted["hits"].values()) == 0 or name == "no thread can start", (name, noted)
    assert "machine" in results["there is no memory for the entry"]["misses"]
    # Other processes do not get the damaged entries.
    assert sum(last["hits"].values()) == 1, last


# -- the job


Fault = Callable[[str], contextlib.AbstractContextManager[dict[str, Any]]]


def _step() -> list[Any]:
    """Return the losses and gradients of two steps."""
    torch.compiler.reset()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    compiled = torch.compile(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seen: list[Any] = []
    for number in range(2):
        loss = compiled(torch.linspace(-1, 1 + number, 32).view(4, 8)).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        seen.append([loss.item(), [each.tolist() for each in gradients if each is not None]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@contextlib.contextmanager
def _hangs(_: str) -> Iterator[dict[str, Any]]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        limits = {"lookup_timeout_s": 1, "attempt_timeout_s": 1}
        yield {"url": "s3://bucket/x", "endpoint_url": endpoint, **KEYS, **limits}


def _copied(remote: str, name: str) -> tuple[Path, list[Path]]:
    copy = Path(shutil.copytree(remote, f"{remote}-{name}"))
    return copy, [path for path in (copy / "objects").rglob("*") if path.is_file()]


@contextlib.contextmanager
def _flipped(remote: str) -> Iterator[dict[str, Any]]:
    """One bit of each entry is flipped."""
    copy, entries = _copied(remote, "damaged")
    for path in entries:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    yield {"url": f"file://{copy}", "local": False}


@contextlib.contextmanager
def _no_memory(remote: str) -> Iterator[dict[str, Any]]:
    """The memory is enough for a compile, but not for the entry of 600 MiB."""
    copy, entries = _copied(remote, "grown")
    for path in entries:
        os.truncate(path, 600 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (400 << 20)
    try:
        before = lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, hard))  # noqa: E731
        yield {"url": f"file://{copy}", "local": False, "before": before}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        shutil.rmtree(copy)


@contextlib.contextmanager
def _no_threads(remote: str) -> Iterator[dict[str, Any]]:
    """No thread can start, as under a limit on processes."""
    refused = RuntimeError("can't start new thread")
    with mock.patch.object(threading.Thread, "start", side_effect=refused):
        yield {"url": f"file://{remote}", "local": False}


FAULTS: dict[str, Fault] = {
    "the server hangs": _hangs,
    "a bit of an entry is another": _flipped,
    "there is no memory for the entry": _no_memory,
    "no thread can start": _no_threads,
}


def under_faults(remote: str) -> dict[str, Any]:
    """Train under each fault; return whether the steps were right, and the counts."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    with functorch.patch(enable_autograd_cache=False):
        expected = _step()
    with s3cache.enabled(f"file://{remote}?create=1", local=False) as cache:
        assert _step() == expected
        assert not cache.flush(30).remaining
        assert account(cache)["saved"] > 0
    results = {}
    for name, fault in FAULTS.items():
        began = time.monotonic()
        with fault(remote) as options:
            before = options.pop("before", None)
            with s3cache.enabled(**{"exit_timeout_s": 1, **options}) as cache:
                if before is not None:
                    before()
                right = _step() == expected
                counts = account(cache)
        results[name] = {"right": right, "seconds": time.monotonic() - began, **counts}
    with s3cache.enabled(f"file://{remote}", local=False) as cache:
        assert _step() == expected
        results["none"] = account(cache)
    return results
