"""What is transferred is shown among torch's own events, by the thread that compiles."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import tests.support.compiler  # noqa: F401
from s3cache import entries
from s3cache.hooks._recorder import TraceEvents
from s3cache.stats import Listener, Listeners, TransferEvent
from s3cache.torch_api import internals
from s3cache.util.forks import call_in_child
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRACE = logging.getLogger("torch.__trace")
NAME = entries.first_name("key")


class Trace(logging.Handler):
    """What torch's log gets of events, and on which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.threads: set[int] = set()

    def emit(self, record: Any) -> None:
        if "chromium_event" in record.metadata:
            self.events.append(json.loads(record.payload))
            self.threads.add(threading.get_ident())

    @property
    def transfers(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] == "X"]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """torch writes one."""
    written = Trace()
    monkeypatch.setattr(TRACE, "handlers", [written])
    monkeypatch.setattr(TRACE, "level", logging.DEBUG)
    return written


@pytest.fixture
def listeners() -> Listeners:
    return Listeners()


@pytest.fixture
def events(listeners: Listeners) -> Iterator[TraceEvents]:
    opened = TraceEvents(listeners.add)
    yield opened
    opened.close()


def emit(listeners: Listeners, *steps: TransferEvent) -> None:
    """Steps of transfers, on a thread of their own; each takes its time."""

    def tell() -> None:
        for step in steps:
            listeners.emit(step)
            time.sleep(0.001)  # else the clock may not go on

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join(LONG_S)


def test_a_transfer_is_written_by_the_next_lookup(
    trace: Trace, events: TraceEvents, listeners: Listeners
) -> None:
    before = time.time()
    emit(
        listeners,
        TransferEvent("download", "started", NAME),
        TransferEvent("download", "done", NAME, 123),
    )
    assert trace.events == []
    with events.shown("s3cache.lookup") as about:
        about["key"] = "key"
    lookup = [(event["name"], event["ph"]) for event in trace.events if event["tid"] == 0]
    assert lookup == [("s3cache.lookup", "B"), ("s3cache.lookup", "E")]
    (transfer,) = trace.transfers
    assert (transfer["name"], transfer["pid"], transfer["tid"]) == ("s3cache.download", 0, 1)
    assert transfer["args"] == {"key": "key", "name": NAME, "bytes": 123, "ended": "done"}
    assert before * 1e6 <= transfer["ts"] <= transfer["ts"] + transfer["dur"] <= time.time() * 1e6
    assert trace.threads == {threading.get_ident()}


def test_concurrent_transfers_have_named_lanes_of_their_own(
    trace: Trace, events: TraceEvents, listeners: Listeners
) -> None:
    emit(
        listeners,
        TransferEvent("upload", "started", "a"),
        TransferEvent("upload", "started", "b"),
        TransferEvent("upload", "failed", "a"),
        TransferEvent("upload", "done", "b"),
        TransferEvent("upload", "started", "c"),
        TransferEvent("upload", "done", "c"),
    )
    events.catch_up()
    lanes = {event["args"]["name"]: event["tid"] for event in trace.transfers}
    assert lanes == {"a": 1, "b": 2, "c": 1}
    named = [(event["tid"], event["args"]) for event in trace.events if event["ph"] == "M"]
    assert named == [(lane, {"name": "s3cache transfers"}) for lane in (1, 2)]
    events.catch_up()
    assert len(trace.transfers) == 3


def test_the_last_ones_are_written_in_the_end(trace: Trace, listeners: Listeners) -> None:
    events = TraceEvents(listeners.add)
    for number in range(3000):
        name = entries.first_name(f"k{number}")
        listeners.emit(TransferEvent("download", "started", name))
        listeners.emit(TransferEvent("download", "absent", name))
    events.close()
    assert len(trace.transfers) == 1024
    emit(
        listeners, TransferEvent("download", "started", "a"), TransferEvent("download", "done", "a")
    )
    events.catch_up()
    assert len(trace.transfers) == 1024


def test_where_torch_writes_no_trace_nothing_is_kept(
    trace: Trace, events: TraceEvents, listeners: Listeners
) -> None:
    TRACE.handlers.clear()
    assert not internals.writes_trace()
    emit(listeners, TransferEvent("upload", "started", "a"), TransferEvent("upload", "done", "a"))
    events.catch_up()
    TRACE.handlers.append(trace)
    assert internals.writes_trace()
    events.catch_up()
    assert trace.events == []


def test_a_trace_that_cannot_be_written_ends_nothing(
    trace: Trace, events: TraceEvents, listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(record: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(trace, "emit", fail)
    emit(listeners, TransferEvent("upload", "started", "a"), TransferEvent("upload", "done", "a"))
    with events.shown("s3cache.save"):
        reached = True
    assert reached


class Engines:
    """Something to subscribe to that a forked child has anew, as an engine's listeners are."""

    def __init__(self) -> None:
        self.renew()
        call_in_child(self.renew)

    def renew(self) -> None:
        self.listeners = Listeners()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self.listeners.add(listener)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_shows_its_own_and_what_its_parent_noted_is_the_parents(
    trace: Trace,
) -> None:
    engines = Engines()
    events = TraceEvents(engines.subscribe)

    def transferred(name: str) -> None:
        engines.listeners.emit(TransferEvent("upload", "started", name))
        engines.listeners.emit(TransferEvent("upload", "done", name))

    transferred("of the parent")
    child = os.fork()
    if child == 0:
        names: list[str] = []
        try:
            transferred("of the child")
            events.catch_up()
            names += (event["args"]["name"] for event in trace.transfers)
        finally:
            os._exit(0 if names == ["of the child"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    events.close()
    assert [event["args"]["name"] for event in trace.transfers] == ["of the parent"]
