"""What torch keeps of compiled graphs in its own forms is the same with s3cache as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache

import s3cache
import tests.support.compiler  # noqa: F401
from s3cache.insight import manifest
from s3cache.records import recorded
from s3cache.settings import WATCHED
from tests.hooks.artifacts import half, opaque, plain
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

GRAPHS = ["plain", "half", "custom", "replaced"]
OF_GRAPHS = ["standalone.bin", "standalone aot", "aot_compile", "caches"]


@pytest.mark.parametrize(
    "ways",
    [["caches"], pytest.param(["standalone.bin", "standalone aot", "aot_compile"], marks=slow)],
)
def test_torchs_artifacts_of_graphs_that_s3cache_refuses_are_kept(
    site: Site, ways: list[str]
) -> None:
    """On the machine that compiles, and on one that finds FX graphs in the bucket.

    A third machine, with another bucket, compiles nothing.
    """
    arguments = ["plain", "half", "custom"], ways, False
    first = site.machine("first").run("artifacts:keep", site.url, *arguments)
    unkept = {name for name, outcome in first["kept"].items() if outcome != "None"}
    assert unkept == {f"half {way}" for way in ways if "standalone" in way}  # nor by torch alone
    assert first["bypass_reasons"] == dict.fromkeys(("function", "custom-operator"), len(ways))
    assert first["torch"]["autograd_cache_bypass"] == ways.count("caches") + len(unkept)

    second, folder = site.machine("second"), str(site.root / "second")
    again = second.run("artifacts:keep", site.url, *arguments)
    assert again["kept"] == first["kept"]
    assert again["bypass_reasons"] == first["bypass_reasons"]
    assert again["fx"]["saved"] == 0

    third = site.machine("third").run("artifacts:use", "memory://empty", *arguments, folder)
    used = {name: outcome for name, outcome in third["used"].items() if name not in unkept}
    assert {name: outcome for name, outcome in used.items() if outcome != ["True", 0]} == {}


def test_each_graph_that_is_not_looked_up_is_recorded_with_the_reason(tmp_path: Path) -> None:
    """``explain`` names it: caches that are off, a fresh cache, a refusal in ``aot_compile``."""
    with torch._dynamo.config.patch(enable_aot_compile=True):  # the default since torch 2.12
        compiled: Any = torch.compile(half, fullgraph=True)
    x = torch.ones(3, 3)
    with s3cache.enabled("memory://recorded", local_dir=str(tmp_path)):
        torch._dynamo.allow_in_graph(opaque)
        compiled.aot_compile(((x,), {}))
        with torch._functorch.config.patch(enable_autograd_cache=False):
            torch.compile(plain)(x)
        torch.compiler.reset()
        with fresh_cache():
            torch.compile(plain)(x)
        records = [each.record for each in s3cache.explain().explanations]
    found = [(each.kind, each.outcome, each.reason) for each in records if each.kind == "aot"]
    assert found == [
        ("aot", "bypass", "function"),
        ("aot", "bypass", "caches-off"),
        ("aot", "bypass", "torch"),
    ]
    assert next(each.outcome for each in records if each.kind == "fx") == "miss"


def test_saves_at_the_second_level_are_recorded_like_those_of_whole_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``s3cache warm`` waits for them, and ``pull`` can fetch them. Each compile is noted."""
    monkeypatch.setenv(WATCHED, "1")
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled: Any = torch.compile(half, fullgraph=True)
    with s3cache.enabled("memory://saves", local_dir=str(tmp_path)) as cache:
        torch._dynamo.allow_in_graph(opaque)
        compiled.aot_compile(((torch.ones(3, 3),), {}))
        cache.flush()
        (run,) = recorded([str(tmp_path)])
    (miss,) = [record for record in run.records if record.kind == "fx"]
    assert miss.outcome == "miss"
    assert miss.key in manifest([run]).splitlines()
    # Once at the start, then the only compile, which Dynamo does not announce.
    assert sum("compiling" in line for line in _lines(tmp_path)) == 3


def _lines(local: Path) -> list[str]:
    (path,) = (local / "records").glob("*.jsonl")
    return path.read_text().splitlines()


@slow
def test_one_context_may_have_a_graph_that_is_cached_and_one_that_is_refused(site: Site) -> None:
    """Each backward belongs to its own graph, also when it is compiled later.

    torch hits the refused graph when the program starts again on the same machine, also if the
    machine has never compiled it.
    """
    first, again, other, other_again = site.machine("one").run("artifacts:pieces", site.url)
    assert first == {"right": True, "lowered": 4, "hits": 0, "saved": 1}
    assert again == {"right": True, "lowered": 0, "hits": 2, "saved": 0}
    assert other == {"right": True, "lowered": 0, "hits": 1, "saved": 0}
    assert other_again == {"right": True, "lowered": 0, "hits": 2, "saved": 0}


@slow
@pytest.mark.parametrize(
    ("names", "ways"),
    [
        (["half", "replaced"], ["standalone aot", "caches"]),
        (["half"], ["export.pt2"]),
        pytest.param(GRAPHS, OF_GRAPHS, marks=nightly),
        pytest.param(GRAPHS[:3], ["export.pt2", "package"], marks=nightly),
        pytest.param(GRAPHS[:3], ["code.pt2"], marks=nightly),  # half a minute of C++ for each
    ],
)
def test_what_torch_alone_can_keep_is_kept(site: Site, names: list[str], ways: list[str]) -> None:
    """Graphs with kernels: kept by torch alone, and on two machines that share a bucket.

    Each is used with s3cache and without it.
    """
    arguments = names, ways, True
    folders = {name: str(site.root / name) for name in ("alone", "first", "second")}
    outcomes: dict[str, Any] = {}
    for name in folders:
        url = None if name == "alone" else site.url
        ran = site.machine(name).run("artifacts:keep", url, *arguments)
        outcomes[name] = ran["kept"]
        assert ran.get("ahead", "code.pt2" in ways) == ("code.pt2" in ways)  # it is recorded
    assert outcomes["first"] == outcomes["second"] == outcomes["alone"]

    others = Site(site.root)  # its processes are forks of other servers than those that kept

    def use(name: str, url: str | None, folder: str) -> Any:
        return others.machine(name).run("artifacts:use", url, *arguments, folder)["used"]

    with_s3cache = use("second-with", "memory://empty", folders["second"])
    expected = use("alone-alone", None, folders["alone"])
    assert with_s3cache == expected
    if "caches" in ways:  # torch alone does not look up keys of s3cache
        arguments = names, ways[:-1], True
        expected = {name: each for name, each in expected.items() if not name.endswith("caches")}
    assert use("first-alone", None, folders["first"]) == expected
