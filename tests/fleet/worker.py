"""One rank of a job: real claims, leases, tiers and uploads, and a trivial compilation.

A job has a few graphs, each with a forward and a backward half. A rank works as the hooks in
torch's compiler do: it looks up the whole graph, then each half; it claims a half that is missing,
compiles and saves it. The bytes of an entry depend on its key only, and a rank compares them at
each hit.

A process that compiles for others announces its steps to the harness: :class:`Steps` wraps public
methods (``claim``, ``save``, and ``release`` of a claim), and subscribes to uploads. A process
announces a step and waits for the harness, which may first carry out its mishap.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from s3cache.cache import Cache, Engine, Hit, Retry, Saved, Work
from s3cache.errors import S3CacheError, TransientError
from s3cache.seam import features
from s3cache.settings import Settings
from s3cache.stats import TransferEvent
from s3cache.store import Store, WrapperStore, open_store
from tests.support.worker import entry, key

STEPS = ("claim", "compile", "save", "upload", "release")


class Steps:
    """Announces the steps of ``engine``, and the values ``about`` it, at the socket ``control``."""

    def __init__(self, engine: Engine, control: str, **about: object) -> None:
        self._control, self._about = control, about
        self._leads = False
        flight = engine.parts["single_flight"]
        flight_claim, engine_save = flight.claim, engine.save

        def claim(key: str, bound_s: float, kind: Any = "fx") -> Any:
            self.reached("claim", "in")
            began = time.monotonic()
            waited = flight_claim(key, bound_s, kind)
            took_s = time.monotonic() - began
            if waited is None:
                return None
            how = {"holder": waited.holder, "timed_out": waited.timed_out}
            self.tell("waited", key=key, took_s=took_s, **how)
            held = waited.claim
            taken_over = getattr(getattr(waited, "lease", None), "taken_over", False)
            self._leads = held is not None and (taken_over or not waited.holder)
            if held is not None and self._leads:
                if taken_over:
                    self.tell("taken over")
                release = held.release

                def released(*, published: bool) -> None:
                    self.reached("release", "in")
                    release(published=published)
                    self.reached("release", "after")

                held.release = released
                self.reached("claim", "after")
                self.reached("compile", "in")
            return waited

        def save(key: str, *args: Any, **options: Any) -> Any:
            if self._leads:
                self._leads = False
                self.reached("compile", "after")
            self.reached("save", "in")
            saved = engine_save(key, *args, **options)
            durable, kind = getattr(saved, "durable", False), options.get("kind", "aot")
            self.tell("saved", key=key, durable=durable, kind=kind)
            self.reached("save", "after")
            return saved

        flight.claim = claim
        engine.save = save  # type: ignore[method-assign]
        engine.subscribe(self._transferred)

    def _transferred(self, event: TransferEvent) -> None:
        if event.direction == "upload" and event.step in ("started", "done"):
            self.reached("upload", "in" if event.step == "started" else "after")

    def reached(self, step: str, moment: str) -> None:
        """Announce a step: ``in`` at its start, ``after`` at its end."""
        self.tell("reached", step=step, moment=moment)

    def tell(self, what: str, **more: object) -> None:
        """Send a message, and wait until the harness has handled it."""
        announce(self._control, what, **self._about, **more)


def announce(control: str, what: str, **more: object) -> None:
    with socket.socket(socket.AF_UNIX) as line, suppress(OSError):  # the harness may have ended
        line.connect(control)
        line.sendall(json.dumps({"what": what, "pid": os.getpid(), **more}).encode() + b"\n")
        line.recv(1)


_BYTES = 3_000
# For processes that check the outcome: a server's first answer takes seconds on a busy machine.
_PATIENT = {"lookup_timeout_s": 60, "attempt_timeout_s": 60, "retry_timeout_s": 60}


def graphs(count: int) -> dict[str, list[str]]:
    """Return the keys of whole graphs, and those of the halves of each."""
    return {
        key(f"{number}-whole"): [key(f"{number}-forward"), key(f"{number}-backward")]
        for number in range(count)
    }


class NodeStore(WrapperStore):
    """The connection of one node to the store: cut or slow while the node has such a file."""

    def __init__(self, inner: Store, node: Path) -> None:
        super().__init__(inner)
        self._cut, self._slow = node / "cut", node / "slow"

    async def _around(self, op: Any, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        await self._pass(op, key)
        answer = await call()
        await self._pass(op, key)  # the store has answered, but the answer may get lost
        return answer

    async def _pass(self, op: Any, key: str) -> None:
        while (how := _read(self._cut)) == "hang":
            await asyncio.sleep(0.05)
        if how:
            raise TransientError("no route to host", op=op, store=self.url, key=key)
        if delay := _read(self._slow):
            await asyncio.sleep(float(delay))


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except FileNotFoundError:
        return ""


def opened(config: dict[str, Any], **changes: Any) -> Engine:
    """Open the engine of a rank with the disk and the connection of its node."""
    node = Path(config["node"])
    options = {
        "local_dir": str(node / "tier"),
        "job_profiles": False,
        "lookup_timeout_s": 3,
        "exit_timeout_s": 3,
        "retry_attempts": 2,
        "attempt_timeout_s": 3,
        "retry_timeout_s": 6,
        "breaker_failures": 4,
        "breaker_reset_s": 1,
        "wait_s": config["wait_s"],
        "leases": config["leases"],
        **changes,
    }
    engine = Engine(
        Settings(**options),
        open_remote=lambda: NodeStore(open_store(config["url"]), node),
        identity="fleet",
        used=features(),
    )
    engine.start()
    return engine


class Rank:
    def __init__(self, engine: Engine, steps: Steps, config: dict[str, Any]) -> None:
        self._engine, self._steps = engine, steps
        self._compile_s: float = config["compile_s"]

    def run(self, wanted: dict[str, list[str]]) -> None:
        for whole, halves in wanted.items():
            if self._found(whole, "aot", None) is None:
                for half in halves:
                    self._half(half)
                self._engine.save(whole, entry(whole, _BYTES), once=True)
            self._steps.tell("has", key=whole)

    def _half(self, half: str) -> None:
        claim: Work | None = None
        published = False

        def claimed() -> Retry | None:
            nonlocal claim
            outcome = self._engine.parts["single_flight"].claim(half, 1e9)
            if outcome is None:
                return None
            claim = outcome.claim
            return outcome.retry()

        try:
            if self._found(half, "fx", claimed) is None:
                time.sleep(self._compile_s)
                self._steps.tell("compiled", key=half)
                saved = self._engine.save(half, entry(half, _BYTES), kind="fx")
                published = isinstance(saved, Saved)
            else:
                published = True
        finally:
            if claim is not None:
                with suppress(S3CacheError):
                    claim.release(published=published)

    def _found(self, key: str, level: Any, claim: Callable[[], Retry | None] | None) -> Hit | None:
        with self._engine.candidates(key, level, retry=claim) as lookup:
            for hit in lookup:
                check(self._steps, key, hit)
                lookup.accept(hit)
                break
        outcome = lookup.close()
        return outcome if isinstance(outcome, Hit) else None


def check(steps: Steps, key: str, hit: Hit) -> None:
    """Check that a hit has exactly the saved bytes."""
    if bytes(hit.entry.data) != entry(key, _BYTES):
        steps.tell("wrong", key=key)


def rank(config: dict[str, Any]) -> None:
    """Run one rank of the job to its end."""
    _begin(config)
    engine = opened(config)
    steps = Steps(engine, config["control"], rank=config["rank"], node=config["number"])
    Rank(engine, steps, config).run(graphs(config["graphs"]))
    steps.tell("worked")
    engine.close()
    steps.tell("ended")


def adopt(config: dict[str, Any]) -> None:
    """Run a later process on a node, which uploads the pending entries of earlier processes."""
    _begin(config)
    engine = opened(config, leases="off", **_PATIENT)
    engine.flush(60)
    engine.close()


def read(config: dict[str, Any]) -> None:
    """Look up all keys in the bucket only, and announce the entries that are there."""
    _begin(config)
    engine = opened(config, local=False, leases="off", **_PATIENT)
    steps = Steps(engine, config["control"], rank="reader", node=-1)
    for whole, halves in graphs(config["graphs"]).items():
        for each in (whole, *halves):
            found = engine.lookup(each)
            if isinstance(found, Hit):
                check(steps, each, found)
                steps.tell("stored", key=each)
    engine.close()


def settle(config: dict[str, Any]) -> None:
    """Upload pending entries from the disks of several nodes, then announce the stored keys."""
    for disk in config["disks"]:
        with Cache.open(config["url"], local_dir=disk, leases="off") as cache:
            cache.flush(60)
    with Cache.open(config["url"], local=False) as cache:
        for each in config["keys"]:
            if isinstance(cache.lookup(each), Hit):
                announce(config["control"], "stored", key=each)


def _begin(config: dict[str, Any]) -> None:
    os.environ["RANK"] = config["rank"]
    log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
