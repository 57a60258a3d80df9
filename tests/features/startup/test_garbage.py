"""Imports without cyclic garbage collections."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from s3cache.features.startup.garbage import without_collections


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for modules; the collector is restored at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    threshold, is_enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(600, 7, 7)
    yield tmp_path
    gc.set_threshold(*threshold)
    (gc.enable if is_enabled else gc.disable)()


_COLLECTING = """\
import gc
started = []
gc.callbacks.append(lambda phase, _: started.append(phase))
kept = [[] for _ in range(100_000)]
gc.callbacks.pop()
"""


def test_no_collection_starts_during_an_import_and_the_collector_is_as_before(
    modules: Path,
) -> None:
    """This holds for nested imports, which may also be registered, and after an error."""
    for name in ("usually", "quietly_inner"):
        (modules / f"{name}.py").write_text(_COLLECTING)
    (modules / "quietly.py").write_text(f"import quietly_inner\n{_COLLECTING}")
    (modules / "quietly_failing.py").write_text("import quietly\nraise ValueError('mistaken')\n")
    finders = [*sys.meta_path]
    cancel = without_collections(["quietly_failing", "quietly", "quietly_inner"])
    without_collections(["usually"])()
    with pytest.raises(ValueError, match="mistaken"):
        import_module("quietly_failing")
    assert gc.get_threshold() == (600, 7, 7)
    cancel()
    assert sys.meta_path == finders
    started = {
        name: import_module(name).started for name in ("quietly", "quietly_inner", "usually")
    }
    assert not started["quietly"]
    assert not started["quietly_inner"]
    assert started["usually"]
    assert gc.get_threshold() == (600, 7, 7)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("change", "threshold", "is_enabled"),
    [
        ("gc.disable()", (600, 7, 7), False),
        ("gc.set_threshold(0)", (0, 7, 7), True),
        ("gc.set_threshold(900, 8, 8)", (900, 8, 8), True),
    ],
)
def test_collector_settings_that_a_program_changes_during_an_import_are_kept(
    modules: Path, change: str, threshold: tuple[int, int, int], is_enabled: bool
) -> None:
    """Its earlier changes stay too."""
    name = f"saying_{abs(hash(change))}"
    (modules / f"{name}.py").write_text(f"import gc\n{change}\n")
    (modules / f"{name}_before.py").write_text("")
    without_collections([name, f"{name}_before"])
    import_module(name)
    assert (gc.get_threshold(), gc.isenabled()) == (threshold, is_enabled)
    import_module(f"{name}_before")
    assert (gc.get_threshold(), gc.isenabled()) == (threshold, is_enabled)


class _Node:
    def __init__(self) -> None:
        self.itself = self


def test_objects_of_an_import_are_old_and_earlier_garbage_is_collected(modules: Path) -> None:
    """The next collections skip these objects. Objects that a program froze stay frozen."""
    for number in range(2):
        (modules / f"making_{number}.py").write_text("kept = [[] for _ in range(1000)]\n")
    without_collections(["making_0", "making_1"])
    garbage = weakref.ref(_Node())
    kept = import_module("making_0").kept
    assert garbage() is None
    young = {id(each) for number in (0, 1) for each in gc.get_objects(number)}
    assert not any(id(each) in young for each in kept)
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        import_module("making_1")
        assert gc.get_freeze_count() > frozen / 2
    finally:
        gc.unfreeze()


_WAITING = """\
import sys
reached, go_on = sys.modules["waiting_events"].pair
reached.set()
assert go_on.wait(60)
"""


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # about forks with threads
def test_other_threads_and_children_have_the_collector_restored(modules: Path) -> None:
    """A child that is forked during the import collects, although no thread ends the import."""
    events = type(sys)("waiting_events")
    reached, go_on = events.pair = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    sys.modules["waiting_events"] = events
    (modules / "waiting.py").write_text(_WAITING)
    (modules / "beside.py").write_text("")
    without_collections(["waiting", "beside"])
    thread = threading.Thread(target=import_module, args=("waiting",))
    thread.start()
    assert reached.wait(60)
    import_module("beside")
    raised = gc.get_threshold()
    assert raised != (600, 7, 7)  # the other import is under way
    if (child := os.fork()) == 0:
        os._exit(int(gc.get_threshold() != (600, 7, 7)))
    go_on.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.get_threshold() == (600, 7, 7)
    assert 0 < raised[0] < 2_000_000  # a program that restores this keeps its collector
