"""An improved entry replaces the first one, on this machine and in the remote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3cache import frame
from s3cache.cache import Engine
from s3cache.frame import Frame
from s3cache.store import MemoryStore
from tests.support.caching import KEY, entry, open_engine
from tests.support.stores import names
from tests.support.waiting import LONG_S

FIRST, BETTER = entry(payload=b"first" * 40), entry(payload=b"better" * 40)


@pytest.fixture
def engine(tmp_path: Path, memory: MemoryStore) -> Iterator[Engine]:
    with open_engine(tmp_path / "a", memory) as engine:
        yield engine


def found(memory: MemoryStore) -> Frame:
    """Return the only entry in the remote."""
    (name,) = names(memory)
    data = asyncio.run(memory.get(name))
    assert data is not None
    return frame.decode(data)


def replaced(engine: Engine) -> None:
    engine.replace(FIRST, bytes(BETTER.data))
    assert engine.flush(LONG_S).complete


def test_an_entry_that_is_replaced_before_its_upload_is_not_uploaded(
    engine: Engine, memory: MemoryStore
) -> None:
    engine.save(KEY, FIRST, delayed=True)
    replaced(engine)
    assert found(memory).digest == BETTER.digest
    assert engine.stats().uploaded == 1
    assert engine.stats().saved == 1


def test_a_better_entry_replaces_an_uploaded_one(engine: Engine, memory: MemoryStore) -> None:
    engine.save(KEY, FIRST)
    assert engine.flush(LONG_S).complete
    replaced(engine)
    assert found(memory).digest == BETTER.digest
    with engine.candidates(KEY, remote=False) as lookup:
        assert [hit.entry.digest for hit in lookup] == [BETTER.digest]


def test_an_entry_of_another_machine_is_not_replaced(
    engine: Engine, memory: MemoryStore, tmp_path: Path
) -> None:
    engine.save(KEY, FIRST, delayed=True)
    others = open_engine(tmp_path / "b", memory)
    theirs = entry(payload=b"as good" * 40)
    others.save(KEY, theirs)
    assert others.flush(LONG_S).complete
    replaced(engine)
    assert found(memory).digest == theirs.digest
    others.close()


@pytest.mark.parametrize("way", ["flush", "close"])
def test_replacements_made_while_finishing_are_uploaded(
    engine: Engine, memory: MemoryStore, way: str
) -> None:
    engine.save(KEY, FIRST, delayed=True)
    engine.events.finishing.subscribe(lambda: engine.replace(FIRST, bytes(BETTER.data)))
    getattr(engine, way)(LONG_S)
    assert found(memory).digest == BETTER.digest


def test_a_read_only_machine_replaces_nothing(tmp_path: Path, memory: MemoryStore) -> None:
    with open_engine(tmp_path / "a", memory, mode="read-only") as engine:
        replaced(engine)
    assert names(memory) == []
