"""Recall does not have the known faults of other stores of traced frames.

``programs/known.txt`` has programs for which torch's own store serves another program's graph, and
for two faults of vLLM: configurations under one name, and a decorated ``forward``; ``test_recall``
runs them. Below are two more faults of vLLM, empty artifacts and stale paths, and sequences of
calls that must compile as often as without recall.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from s3cache.features.recall import KEYS
from tests.features.recall.programs import Program
from tests.features.recall.run import _Fleet, differs
from tests.support.marks import cases, nightly, slow

# A limit for hangs: processes wait for one another on a busy machine.
pytestmark = [slow, pytest.mark.timeout(1800)]

Damage: TypeAlias = Callable[[list[Path]], None]

STORED = [
    Program(
        "stored",
        f"stored/{name}",
        f"""\
class M(nn.Module):
    def __init__(self): super().__init__(); self.act, self.inner = {act}, nn.Linear(16, 4)
    def forward(self, x):
        x = self.act(x) + {times}
        torch._dynamo.graph_break()
        return self.inner(x) * {times}
f = M()
def run(g): return trained(g, x, of=f)
""",
    )
    # The frames of the two programs have different keys.
    for name, act, times in (("function", "torch.sin", 2), ("closure", "made(3.0)", 3))
]
# The result of each call, and the frames compiled by then: of `f`, and in all. A call may raise.
_CALLS = {
    "shapes": """\
def f(x): return x.sin() * x.shape[0] + (1 if x.shape[0] > 6 else 2)
def run(g): return called((g, x[:n]) for n in (4, 4, 5, 6, 1, 0, 7))
""",
    "dtypes, ranks and modes": """\
def f(x): return x * 2 + torch.is_grad_enabled()
def run(g):
    wanting = x.clone().requires_grad_()
    some = called((g, each) for each in (x, x.double(), x.reshape(4, 4), x, wanting))
    with torch.no_grad(): return some, called([(g, x), (g, x.double())])
""",
    "attributes": """\
class M(nn.Module):
    def __init__(self): super().__init__(); self.scale, self.flag, self.act = 2, False, torch.sin
    def forward(self, x): return self.act(x) * self.scale + (1 if self.flag else 2)
f = M()
def run(g):
    return [
        (setattr(f, name, value), called([(g, x)]))[1]
        for name, value in (
            ("scale", 2), ("scale", 3), ("scale", 4), ("scale", 2.5), ("flag", True),
            ("act", torch.cos), ("act", torch.sin), ("flag", False), ("training", False),
        )
    ]
""",
    "breaks": """\
def f(x, k):
    x = x + 1
    torch._dynamo.graph_break()
    x = x * k
    torch._dynamo.graph_break()
    return x.cos() if x.sum() > 0 else x.sin()
def run(g):
    given = (x, 2), (x, 3), (x[:5], 3), (-x[:5], 4), (x, 2)
    return called((g, each, k) for each, k in given)
""",
    "training": """\
f = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 2))
def run(g):
    found = []
    for step in range(4):
        if step == 2: f[0].weight.requires_grad_(False)
        f.zero_grad()
        found += [trained(g, x.expand(2 + step // 3, 16), of=f), called([])]
    return found
""",
    "limit": """\
def f(x, k): return x + len(k)
def run(g):
    with torch._dynamo.config.patch(recompile_limit=2):
        return called((g, x, k) for k in ("a", "bb", "ccc", "dddd", "a", "bb"))
""",
    "limit of whole graphs": """\
options = {"fullgraph": True}
def f(x, k): return x + len(k)
def run(g):
    with torch._dynamo.config.patch(recompile_limit=2):
        return called((g, x, k) for k in ("a", "bb", "ccc", "dddd"))
""",
}
_CALLED = """\
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
def compiled():
    entries = _debug_get_cache_entry_list(getattr(f, "forward", f).__code__)
    return [len(entries), torch._dynamo.utils.counters["frames"]["ok"]]
def called(calls):
    found = []
    try:
        for g, *args in calls: found += [g(*args), compiled()]
    except Exception as exc: found += [type(exc).__name__, str(exc).split("\\n")[0]]
    return [*found, compiled()]
"""
CALLS = [Program("calls", f"calls/{name}", _CALLED + text) for name, text in _CALLS.items()]


def _played(fleet: _Fleet, programs: list[Program], how: str = "on") -> list[dict[str, Any]]:
    """Run programs on one more machine; return their results and counts."""
    ran = fleet.run({each: [("A", how)] for each in programs})
    found = [ran[each]["A", how] for each in programs]
    assert [error for error in found if isinstance(error, str)] == []
    return [part for [part] in found]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return the remote of programs on a machine that is gone, and their results."""
    root = tmp_path_factory.mktemp("stored")
    found = _played(_Fleet(root, 2), STORED)
    assert [each["saved"] for each in found] == [2, 2]
    remote = (root / "remote").rename(tmp_path_factory.mktemp("kept") / "remote")
    shutil.rmtree(root)
    return remote, [each["got"] for each in found]


def _read(stored: tuple[Path, list[Any]], root: Path, damage: Damage = lambda _: None) -> list[Any]:
    """Run with a copy of the remote, check the answers; return frames recalled and traced."""
    remote, expected = stored
    fleet = _Fleet(root, 2)
    shutil.copytree(remote, root / "remote", dirs_exist_ok=True)
    damage([path for path in sorted((root / "remote").rglob("*")) if path.is_file()])
    found = _played(fleet, STORED)
    assert differs([each["got"] for each in found], expected) == ""
    return [(each["recalled"], each["traced"]) for each in found]


def test_no_path_of_the_machine_that_saved_is_needed(
    stored: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Its disk with Inductor's cache is gone, and so is its folder of programs."""
    assert _read(stored, tmp_path) == [(2, 0), (2, 0)]


def _empty(paths: list[Path]) -> None:
    for path in paths:
        path.write_bytes(b"")


def _exchange(paths: list[Path]) -> None:
    assert len({path.stem for path in paths}) == len(paths) > 1  # all of different keys
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


DAMAGES: dict[str, tuple[bool, Damage]] = {
    "empty frames": (True, _empty),
    "frames of others": (True, _exchange),
    "empty graphs": (False, _empty),
}


@pytest.mark.parametrize("name", cases(DAMAGES, nightly_ones=("empty frames",)))
def test_a_damaged_artifact_is_a_miss(
    name: str, stored: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """There is no error and no wrong answer; the frame is traced."""
    of_frames, how = DAMAGES[name]

    def damage(paths: list[Path]) -> None:
        chosen = [path for path in paths if path.name.startswith(KEYS) == of_frames]
        assert len(chosen) >= 3
        how(chosen)

    assert _read(stored, tmp_path, damage) == [(0, 2), (0, 2)]


@nightly
def test_calls_compile_as_often_as_without_recall(tmp_path: Path) -> None:
    """This covers recompiles, their limit and its error, graph breaks and training."""
    fleet = _Fleet(tmp_path, 2)
    off, cold, warm = (_played(fleet, CALLS, how) for how in ("off", "on", "on"))
    for program, without, *others in zip(CALLS, off, cold, warm, strict=True):
        for found in others:
            assert differs([found["got"]], [without["got"]]) == "", program.name
        assert others[-1]["recalled"] >= 2, program.name
