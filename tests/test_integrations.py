"""Entries are uploaded when a checkpoint is saved."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any, cast

import pytest

from s3cache import Cache, ConfigError
from s3cache.integrations import Framework, flush_at_checkpoint
from s3cache.tier import FlushReport
from tests.support.scripts import run_script


class Watched:
    """A stand-in for a cache that notes the timeout of each flush."""

    def __init__(self, remaining: int = 0) -> None:
        self.flushed: list[float | None] = []
        self._remaining = remaining

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        self.flushed.append(timeout_s)
        return FlushReport(0, self._remaining, None)


class Callback:
    """The base class of callbacks in each stand-in framework."""

    def on_save(self, *_: object, **__: object) -> None:
        raise AssertionError("it was not overridden")

    on_save_checkpoint = on_save

    def on_step_end(self) -> str:
        return "the framework's own"


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packages; ``tests/frameworks`` uses the real ones."""
    for package, name in (
        ("transformers", "TrainerCallback"),
        ("lightning", "nothing"),
        ("lightning.pytorch", "Callback"),
        ("pytorch_lightning", "Callback"),
    ):
        module = ModuleType(package)
        setattr(module, name, Callback)
        monkeypatch.setitem(sys.modules, package, module)


def test_a_block_is_followed_by_a_bounded_flush_unless_it_fails() -> None:
    cache = Watched(remaining=1)
    with flush_at_checkpoint(timeout_s=7, cache=cast("Cache", cache)):
        assert cache.flushed == []
    assert cache.flushed == [7]
    with pytest.raises(ZeroDivisionError), flush_at_checkpoint(cache=cast("Cache", cache)):
        raise ZeroDivisionError
    assert cache.flushed == [7]


@pytest.mark.parametrize("framework", ["transformers", "lightning", "pytorch_lightning"])
def test_a_callback_flushes_when_its_trainer_saves_and_does_nothing_else(
    frameworks: None, framework: Framework
) -> None:
    event = "on_save" if framework == "transformers" else "on_save_checkpoint"
    cache = Watched()
    callback = flush_at_checkpoint(framework, timeout_s=7, cache=cast("Cache", cache))
    assert isinstance(callback, Callback)
    assert callback.on_step_end() == "the framework's own"
    getattr(callback, event)("arguments", "state", "control", model=None)
    assert cache.flushed == [7]
    again = pickle.loads(pickle.dumps(callback))
    assert isinstance(again, Callback)
    assert getattr(again, event)("in another process") is None


def test_saved_entries_are_in_the_remote_after_the_block() -> None:
    """The block flushes the enabled cache; without one it does nothing."""
    run_script(
        """
        import s3cache
        from s3cache import frame
        from s3cache.integrations import flush_at_checkpoint
        with flush_at_checkpoint():
            pass
        with s3cache.enabled("memory://remote", local=False) as cache:
            with flush_at_checkpoint():
                for number in range(50):
                    key = f"k{number}"
                    content = {"s": os.urandom(100_000)}
                    cache.save(key, frame.encode(kind="test", key=key, sections=content))
            assert cache.stats().uploaded == 50, cache.stats()
        """
    )


def test_a_missing_or_unknown_framework_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        flush_at_checkpoint("transformers")
    with pytest.raises(ConfigError, match="give one of transformers, lightning"):
        flush_at_checkpoint(cast("Any", "keras"))
