"""What each operation comes to under each outcome that a fault can have.

A row of ``FAULTS`` is one fault of each outcome; a column is an operation; in the cell is the
result. After each of them the fault ends, and then everything that was saved arrives: nothing is
lost, and nothing that was read was wrong. Which errors have which outcome is in
tests/store/test_s3_errors.py, faults of links in test_network.py, of the disk in test_disk.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.cache import Cache, Engine, Hit, Saved
from s3cache.settings import Settings
from s3cache.store import open_store, parse_url
from s3cache.tier import DiskTier
from tests.support.gate import Answer, Gate, refusal
from tests.support.marks import slow
from tests.support.processes import KEYS
from tests.support.proxy import Proxy
from tests.support.waiting import eventually
from tests.support.worker import entry, keys

if TYPE_CHECKING:
    from pathlib import Path

    from s3cache import TransferEvent

SIZE = 20_000
THERE = keys(0, 3, "there")
OURS = keys(0, 5, "ours")
LEFT = keys(0, 6, "left")
WARM = "key-warm"
# Nothing that waits for the network may take longer, whatever happens; a busy machine included.
BOUND_S = 60.0


@dataclass
class Site:
    """A server behind a gate and a link, and machines that use it."""

    root: Path
    url: str
    gate: Gate
    proxy: Proxy
    caches: list[Cache] = field(default_factory=list)
    #: Of what waits for uploads: short where they cannot come to an end.
    flush_s: float = BOUND_S

    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.proxy.url, "read_timeout_s": 5.0, **KEYS}

    def cache(self, machine: str, **changes: Any) -> Cache:
        quick: dict[str, Any] = {
            "lookup_timeout_s": BOUND_S,
            "attempt_timeout_s": 2 * BOUND_S,
            "retry_timeout_s": 3 * BOUND_S,
            "upload_timeout_s": 3 * BOUND_S,
            "retry_attempts": 2,
            "exit_timeout_s": 1.0,
            "breaker_failures": 100,
        }
        settings = Settings(**{**quick, "local_dir": str(self.root / machine), **changes})
        identity = parse_url(self.url, **self.options()).identity
        remote = partial(open_store, self.url, **self.options())
        engine = Engine(settings, open_remote=remote, identity=identity)
        self.caches.append(engine)
        return self.caches[-1]

    def heal(self) -> None:
        self.gate.open()
        self.proxy.heal()


@pytest.fixture
def site(tmp_path: Path, url: str, moto_port: int) -> Iterator[Site]:
    with Gate(moto_port) as gate, Proxy(gate.port) as proxy:
        site = Site(tmp_path, url, gate, proxy)
        writer = site.cache("writer")
        for key in [*THERE, WARM]:
            writer.save(key, entry(key, SIZE))
        assert writer.flush(BOUND_S).complete
        writer.close()
        yield site
        site.heal()
        for cache in site.caches:
            cache.close(0)


# -- operations: each returns its outcome


def lookup(site: Site, cache: Cache) -> str:
    found = cache.lookup(THERE[0])
    if isinstance(found, Hit):
        assert bytes(found.entry.data) == entry(THERE[0], SIZE)
        return "hit"
    return str(found.reason)


def save(site: Site, cache: Cache) -> str:
    results = [cache.save(key, entry(key, SIZE)) for key in OURS]
    assert all(isinstance(each, Saved) and each.durable for each in results)
    assert all(isinstance(cache.lookup(key), Hit) for key in OURS)
    return "durable"


def upload(site: Site, cache: Cache) -> str:
    steps = _steps(cache, "upload")
    save(site, cache)
    return _first(steps)


def prefetch(site: Site, cache: Cache) -> str:
    report = cache.prefetch(THERE).wait(BOUND_S)
    assert report.complete
    return "found" if report.found == len(THERE) else f"{report.failed} failed"


def flush(site: Site, cache: Cache) -> str:
    save(site, cache)
    report = cache.flush(site.flush_s)
    assert report.in_memory == 0
    assert report.complete == (report.remaining == 0)
    return f"{report.remaining} remain"


def leave(site: Site, cache: Cache) -> str:
    """The exit."""
    save(site, cache)
    return f"{cache.close(site.flush_s).remaining} remain"


def adopt(site: Site, cache: Cache) -> str:
    """What a process that is gone has left, and what becomes of that while the fault lasts."""
    cache.close(0)
    dead = _tier(site)
    for key in LEFT:
        dead.put_pending(f"v1/{_spread(key)}/{key}._", entry(key, SIZE))
    dead.close()
    claimer = site.cache("machine")
    steps = _steps(claimer, "upload")
    claimer.start()
    outcome = _first(steps)
    if outcome == "done":
        eventually(lambda: steps.count("done") == len(LEFT))
        return "uploaded"

    def free() -> int:
        other = _tier(site)
        try:
            return len(other.adopt())
        finally:
            other.close()

    if outcome == "failed":
        eventually(lambda: free() == len(LEFT))
        return "left to others"
    # Between two tries, or after the last, it may have given that one back.
    return "at most one is held" if free() >= len(LEFT) - 1 else "held"


def evict(site: Site, cache: Cache) -> str:
    """Within its bounds the tier gives up what others have, and never what is to be uploaded."""
    cache.close()
    small = site.cache("machine", local_max_files=8)
    for key in OURS:
        assert isinstance(small.save(key, entry(key, SIZE)), Saved)
    for number in range(30):
        key = f"more-{number}"
        small.save(key, entry(key, SIZE))
        usage = small.stats().local
        assert usage is not None
        assert usage.files <= 8
    small.close(0)
    return "bounded"


def _steps(cache: Cache, direction: str) -> list[str]:
    steps: list[str] = []

    def note(event: TransferEvent) -> None:
        if event.direction == direction and event.step not in ("queued", "started"):
            steps.append(event.step)

    cache.subscribe(note)
    return steps


def _first(steps: list[str]) -> str:
    """How the first transfer ended, or its first try."""
    eventually(lambda: steps)
    return steps[0]


def _tier(site: Site) -> DiskTier:
    import hashlib

    identity = parse_url(site.url, **site.options()).identity
    return DiskTier(
        site.root / "machine",
        max_bytes=1 << 30,
        max_files=10_000,
        namespace=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def _spread(key: str) -> str:
    from s3cache.entries import name_prefix

    return name_prefix(key).split("/")[1]


OPERATIONS: dict[str, Callable[[Site, Cache], str]] = {
    "lookup": lookup,
    "save": save,
    "upload": upload,
    "prefetch": prefetch,
    "flush": flush,
    "exit": leave,
    "adoption": adopt,
    "eviction": evict,
}

# -- faults


def answers(answer: Answer, *methods: str) -> Callable[[Site], None]:
    def start(site: Site) -> None:
        site.gate.rule = lambda method, *_: answer if not methods or method in methods else None

    return start


def changes(change: Callable[[bytes], bytes]) -> Callable[[Site], None]:
    """Of each body that is an entry."""

    def start(site: Site) -> None:
        site.gate.change = lambda body: change(body) if len(body) > SIZE else body

    return start


PASSING = {
    "lookup": "unavailable",
    "save": "durable",
    "upload": "retried",
    "prefetch": "3 failed",
    "flush": "5 remain",
    "exit": "5 remain",
    "adoption": "at most one is held",
    "eviction": "bounded",
}
REFUSING = {**PASSING, "upload": "failed", "adoption": "left to others"}
READ_ONLY = {**REFUSING, "lookup": "hit", "prefetch": "found"}
WORKING = {
    **READ_ONLY,
    "upload": "done",
    "flush": "0 remain",
    "exit": "0 remain",
    "adoption": "uploaded",
}
UNREADABLE = {**WORKING, "lookup": "unavailable", "prefetch": "3 failed"}

# How a fault begins, and what each operation comes to.
FAULTS: dict[str, tuple[Callable[[Site], None], dict[str, str]]] = {
    "500": (answers(refusal(500, "InternalError")), PASSING),
    "no bucket": (answers(refusal(404, "NoSuchBucket")), REFUSING),
    "may not write": (answers(refusal(403, "AccessDenied"), "PUT"), READ_ONLY),
    "none": (lambda site: None, WORKING),
    "cuts bodies": (changes(lambda body: body[:-99]), UNREADABLE),
}
# One of each fault and of each operation for make test.
ALWAYS = {
    ("500", "upload"),
    ("500", "eviction"),
    ("no bucket", "flush"),
    ("no bucket", "save"),
    ("may not write", "adoption"),
    ("may not write", "exit"),
    ("none", "lookup"),
    ("cuts bodies", "prefetch"),
    ("none", "flush"),
}
CELLS = [
    pytest.param(
        fault,
        operation,
        marks=[] if (fault, operation) in ALWAYS else slow,
        id=f"{fault}: {operation}",
    )
    for fault in FAULTS
    for operation in OPERATIONS
]


@pytest.mark.parametrize(("fault", "operation"), CELLS)
def test_cell(fault: str, operation: str, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    start, expected = FAULTS[fault]
    if expected[operation].endswith("remain") and not expected[operation].startswith("0 "):
        site.flush_s = 3.0
    cache = site.cache("machine")
    eventually(lambda: isinstance(cache.lookup(WARM), Hit))  # the client is made
    caplog.clear()
    start(site)
    assert OPERATIONS[operation](site, cache) == expected[operation]
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == len({*said}), "each problem is reported once"

    # Nothing is lost, and nothing was harmed.
    site.heal()
    for each in site.caches:
        each.close(0)
    after = site.cache("machine")
    after.start()
    eventually(lambda: after.flush(BOUND_S).complete)
    expected_there = [*THERE]
    if operation not in ("lookup", "prefetch", "adoption"):
        expected_there += OURS
    if operation == "adoption":
        expected_there += LEFT
    other = site.cache("other")
    for key in expected_there:
        found = other.lookup(key)
        assert isinstance(found, Hit), (key, found)
        assert bytes(found.entry.data) == entry(key, SIZE)
