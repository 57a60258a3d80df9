"""A hit's backward is the one that its own program would lower."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module
from torch._inductor import config as inductor
from torch.fx import Graph, GraphModule

from s3cache.hooks import _again, _rebuild
from s3cache.hooks._again import deserialize_backward
from s3cache.hooks._state import Patches
from s3cache.torch_api import internals
from tests.hooks.jobs import account, log_records, machine_here
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def _twice(step: dict[str, Any]) -> list[Any]:
    return [pytest.approx([2 * number for number in row], rel=1e-4) for row in step["grad"]]


def test_dynamo_traces_no_function_of_s3cache_when_a_backward_is_lowered_late(site: Site) -> None:
    """Torch calls the hooks while the compiled program runs, and Dynamo sees what runs then."""
    frames = site.machine("one").run("healing:count_frames", site.url)
    assert frames["hit"] < frames["miss"] <= frames["alone"]


@slow
def test_a_backward_is_lowered_under_the_settings_of_its_own_program(site: Site) -> None:
    """If they differ from the entry's, it is lowered again: once for all machines (second level).

    Options of ``torch.compile`` are no such difference: they apply to the backward too. A backward
    that is lowered again keeps nodes without inputs (zeros, a seed). If lowering fails, it runs
    uncompiled. A graph that is kept for a second backward may be a hit, although torch refuses to
    keep a graph with a backward that reuses the memory of saved tensors.
    """
    names = [
        *("strict", "first", "same", "other", "another", "broken settings", "broken trace"),
        *("first strict", "same strict", "other plain", "options", "same options"),
        *("freed", "kept", "sliced strict", "sliced", "sliced other"),
    ]
    strict, sliced, times = {"casts": True}, {"program": "sliced"}, {"program": "times"}
    steps: list[dict[str, Any]] = [
        {"site": "alone", **strict},
        *({"site": "a"}, {"site": "a"}, {"site": "a", **strict}, {"site": "a", **strict}),
        {"site": "a", **strict, "fault": "settings_digest"},
        {"site": "a", **strict, "fault": "_new_trace"},
        *({"site": "b", **strict}, {"site": "b", **strict}, {"site": "b"}),
        *({"site": "c", "options": True}, {"site": "c", "options": True}),
        *({"site": "d", **times}, {"site": "d", **times, "kept": True}),
        {"site": "sliced alone", **sliced, **strict},
        *({"site": "e", **sliced}, {"site": "e", **sliced, **strict}),
    ]
    remote = f"file://{site.root}/remotes"
    ran = site.machine("one").run("test_backwards:backwards", remote, steps)
    found: dict[str, Any] = dict(zip(names, ran, strict=True))

    def outcome(name: str) -> tuple[int, int, int]:
        return found[name]["hits"], found[name]["again"], found[name]["uncompiled"]

    assert found["strict"]["grad"] != found["first"]["grad"]
    assert found["first"]["saved"] == 1
    for name, first, again in (
        *(("same", "first", 0), ("same strict", "first strict", 0), ("same options", "options", 0)),
        *(("other", "strict", 1), ("another", "strict", 1), ("sliced other", "sliced strict", 1)),
    ):
        assert outcome(name) == (1, again, 0), name
        assert found[name]["grad"] == found[first]["grad"]
    assert [found[name]["second level hits"] for name in ("other", "another")] == [0, 1]
    assert outcome("other plain") == outcome("kept") == (1, 1, 0)
    assert found["other plain"]["grad"] != found["first strict"]["grad"]
    assert found["kept"]["grad"] == _twice(found["freed"])
    for name in ("broken settings", "broken trace"):
        assert (found[name]["hits"], found[name]["uncompiled"]) == (1, 1), name
        for row, expected in zip(found[name]["grad"], found["strict"]["grad"], strict=True):
            assert row == pytest.approx(expected, rel=1e-2, abs=5e-3)


@slow
def test_ranks_lower_backwards_early_without_an_effect_on_the_program(site: Site) -> None:
    """The rank that compiles saves the whole graph before it continues.

    It still gets the backward for its own settings, or for a graph that is kept: that backward is
    lowered at its first call, as without s3cache. So is a backward that cannot be lowered early.
    """
    names = ("first", "same", "strict", "strict hit", "freed", "kept", "kept hit", "late")
    strict, times = {"casts": True}, {"program": "times"}
    steps: list[dict[str, Any]] = [
        *({"site": "a"}, {"site": "a"}),
        *({"site": "b", **strict}, {"site": "b", **strict}),
        *({"site": "c", **times}, {"site": "d", **times, "kept": True}),
        *({"site": "d", **times, "kept": True}, {"site": "e", "late": True}),
    ]
    rank = site.machine("one", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0")
    ran = rank.run("test_backwards:backwards", f"file://{site.root}/remotes", steps)
    found: dict[str, Any] = dict(zip(names, ran, strict=True))

    def outcome(name: str) -> tuple[int, int, int, int]:
        step = found[name]
        return step["hits"], step["saved"], step["lowered"], step["again"]

    assert outcome("first") == (0, 1, 2, 0)
    assert outcome("same") == (1, 0, 0, 0)
    assert found["same"]["grad"] == found["first"]["grad"]
    assert outcome("strict") == (0, 1, 3, 0)
    assert outcome("strict hit")[:2] == (1, 0)
    assert found["strict hit"]["grad"] == found["strict"]["grad"] != found["first"]["grad"]
    assert [outcome(name) for name in ("freed", "kept", "late")] == [
        *((0, 1, 2, 0), (0, 1, 3, 0), (0, 1, 2, 0))
    ]
    assert found["kept"]["grad"] == found["kept hit"]["grad"] == _twice(found["freed"])
    assert found["late"]["grad"] == found["first"]["grad"]


# -- the backward that compiled autograd gets from a hit has all of its operators


aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    patches = Patches()
    patches.wrap(internals.deserialize_backward, deserialize_backward)
    yield
    patches.close()


def _round_trip(graph: Graph) -> GraphModule:
    return serialize_graph_module(GraphModule(torch.nn.Module(), graph)).deserialize()


def test_a_size_in_a_list_is_kept() -> None:
    graph = Graph()
    x, size = graph.placeholder("x"), graph.placeholder("size")
    graph.output(graph.call_function(aten.expand.default, (x, [2, size])))
    assert _round_trip(graph)(torch.ones(1, 3), 3).shape == (2, 3)


def test_random_numbers_are_drawn_in_every_call() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(aten.rand.default, ([4],))
    graph.output(graph.call_function(aten.mul.Tensor, (x, drawn)))
    kept = serialize_graph_module(GraphModule(torch.nn.Module(), graph))
    module, again = kept.deserialize(), kept.deserialize()  # asked for more than once
    assert module.code == again.code
    assert not torch.equal(module(torch.ones(4)), module(torch.ones(4)))


# -- jobs with compiled code that relies on more than its key


def cubed(x: Any) -> Any:
    return (x.half() * x.half() * 1.1).float().sin() * x


def times(x: Any) -> Any:
    """A program with a backward that reuses the memory of saved tensors."""
    return (x @ x.t()).tanh() @ x


def sliced(x: Any) -> Any:
    """A program with a backward that begins with zeros, which have no inputs."""
    return (x[:3].half() * x[1:4].half() * 1.1).float().sin() * x[:3]


PROGRAMS = {each.__name__: each for each in (cubed, times, sliced)}


def backwards(remote: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take training steps, each on a fresh machine, with the remote at ``remote/SITE``.

    In a step, ``casts`` is a setting during its backward, ``fault`` names a function that fails
    then, ``late`` keeps the backward from being lowered early, ``kept`` runs two backwards, and
    ``options`` gives options to ``torch.compile``.
    """
    records, found = log_records(logging.INFO), []
    for number, step in enumerate(steps):
        records.clear()
        site = step.pop("site")
        with machine_here(f"{remote}/{site}?create=1", f"{number}") as cache:
            grad = _step(**step)
            cache.flush()
            counts = account(cache)
        seen = [record.getMessage() for record in records]
        found.append(
            {
                "grad": grad,
                "again": sum("lowered again, under" in line for line in seen),
                "uncompiled": sum("runs uncompiled" in line for line in seen),
                "hits": sum(counts["hits"].values()),
                "second level hits": counts["inductor"].get("fxgraph_cache_hit", 0),
                "lowered": counts["inductor"].get("fxgraph_cache_miss", 0),
                "saved": counts["saved"],
            }
        )
    return found


def _step(
    casts: bool = False,
    kept: bool = False,
    fault: str = "",
    late: bool = False,
    options: bool = False,
    program: str = "cubed",
) -> Any:
    given = {"options": {"max_fusion_size": 3}} if options else {}
    compiled: Any = torch.compile(PROGRAMS[program], **given)  # type: ignore[call-overload]
    x = torch.linspace(-2, 3, 48).view(6, 8).requires_grad_()
    injected = OSError("injected")
    with patch.object(internals, "copy_graph", side_effect=injected) if late else nullcontext():
        out = compiled(x)
    owner = _again if fault == "_new_trace" else _rebuild
    broken = patch.object(owner, fault, side_effect=injected) if fault else nullcontext()
    with inductor.patch(emulate_precision_casts=casts), broken:
        out.sum().backward(retain_graph=kept)
        if kept:
            out.sum().backward()
    assert x.grad is not None
    return x.grad.tolist()
