"""Our ``Storage`` obeys torchtitan's ``StorageAdapter`` contract, also on several machines."""

from __future__ import annotations

import inspect

import pytest

from s3cache.errors import StoreError
from s3cache.features.ports.torchtitan import Storage
from tests.features.ports.conftest import Start
from tests.features.ports.installed import needs


def test_it_obeys_the_contract_of_a_storage_adapter(start: Start) -> None:
    start("one")
    storage = Storage("model")
    assert not storage.exists("trace")
    with pytest.raises(FileNotFoundError):
        storage.load("trace")
    assert storage.save("trace", b"first")
    assert (storage.exists("trace"), storage.load("trace")) == (True, b"first")
    storage.save("trace", b"")
    assert storage.load("trace") == b""
    assert Storage("other").exists("trace") is False
    storage.delete("trace")
    storage.delete("trace")
    assert not storage.exists("trace")


def test_another_machine_loads_the_latest_artifact(start: Start) -> None:
    """It does so even with an older artifact on its own disk."""
    one = start("one")
    Storage("model").save("trace", b"first")
    assert not one.flush(10).remaining
    two = start("two")
    assert Storage("model").load("trace") == b"first"
    assert two.stats().kinds["torchtitan"].hits["remote"] == 1
    again = start("one")
    Storage("model").save("trace", b"second")
    assert not again.flush(10).remaining
    start("two")
    assert Storage("model").load("trace") == b"second"


def test_a_save_that_is_not_possible_raises_an_error(start: Start) -> None:
    start("one", mode="read-only")
    with pytest.raises(StoreError):
        Storage("model").save("trace", b"first")


def test_the_port_can_be_disabled(start: Start) -> None:
    start("one", ports="triton")
    with pytest.raises(StoreError):
        Storage("model").save("trace", b"first")


@needs("torchtitan")
def test_it_has_the_methods_of_torchtitan() -> None:
    from torchtitan.experiments.graph_trainer.storage import StorageAdapter

    for name in StorageAdapter.__abstractmethods__:
        theirs, ours = getattr(StorageAdapter, name), getattr(Storage, name)
        assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
