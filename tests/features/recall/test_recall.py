"""Recall returns traced frames, but none for which something that Dynamo read has changed.

``make test-all`` runs programs of the table that were wrong once, one of each class, and
``make test-nightly`` all; ``python -m tests.features.recall.run`` prints the verdicts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.recall.programs import Program, all_programs
from tests.features.recall.run import judge
from tests.support.machines import Machine, remote_url
from tests.support.marks import nightly, slow

#: Programs that were once answered wrongly or not recalled.
FOUND = {
    *("inputs/list or tuple", "torch_state/dispatch mode", "objects/global hides a builtin"),
    *("breaks/closure held over a break", "reflection/order of vars", "asks/str of a dataclass"),
    *("folds/version of a distribution in a helper", "sizes/memory format varies"),
    *("registries/registered with a mutable mapping", "values/parameter outside of modules"),
    *("wider/class of a returned named tuple changes", "wider/item of a set in a class"),
    *("operators/strides from a fake of an operator", "operators/global of a tensor subclass"),
    *("optimizers/momentum", "optimizers/state from before", "distributed/placement changes"),
}
# Functions and numbers that a configuration chooses; torch's own store serves the first choice.
CHOSEN = ("global: function in a dict", "module's attribute", "class attribute")


@pytest.mark.timeout(7200)  # for hangs: processes wait for one another on a busy machine
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FOUND, id="found", marks=slow),
        pytest.param({each.name for each in all_programs()}, id="all", marks=nightly),
    ],
)
def test_no_change_is_missed(names: set[str], tmp_path: Path) -> None:
    """An unchanged program is recalled, and a changed one traced, with the same compiles."""
    programs = [each for each in all_programs() if each.name in names]
    assert len(programs) == len(names)
    verdicts = judge(programs, tmp_path, jobs=2)
    assert verdicts.wrong == []
    assert len(verdicts.recalled) >= 0.6 * len(programs)
    known = {each.name for each in programs if each.family == "known"}
    assert known <= {*verdicts.recalled}, "programs that other stores serve wrongly"


@pytest.mark.timeout(1800)
@nightly
def test_the_harness_detects_an_unsafe_store(tmp_path: Path) -> None:
    """torch's own store drops guards on identity, so it serves the trace of another function."""
    programs = [each for each in all_programs() if each.name.startswith(CHOSEN)]
    verdicts = judge(programs[:6], tmp_path, "precompile", jobs=2)
    assert verdicts.wrong


def test_the_table_is_long_enough() -> None:
    programs: list[Program] = [*all_programs()]
    assert len(programs) >= 300
    assert sum(each.is_live for each in programs) >= 100


def _train(url: str) -> dict[str, int]:
    """Enable the cache before torch is imported, and compile; return hits and misses."""
    import s3cache

    with s3cache.enabled(url) as cache:
        import torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight])  # imports Dynamo but not the compiler
        torch.compile(lambda x: (x.exp() * weight).sum())(torch.ones(3)).backward()
        optimizer.step()
        assert not cache.flush(60).remaining
        return {
            "hits": sum(cache.stats().hits.values()),
            "misses": sum(cache.stats().misses.values()),
        }


@slow
@pytest.mark.timeout(900)
def test_graphs_are_shared_with_processes_that_do_not_recall(tmp_path: Path) -> None:
    """Keys of graphs do not depend on how early s3cache first inspects torch."""
    found = [
        Machine(tmp_path / recall, S3CACHE_RECALL=recall)
        .run(f"{__name__}:_train", remote_url(tmp_path), server=server)
        .result
        for recall, server in (("off", 0), ("on", None))  # the second imports torch with s3cache
    ]
    assert [each["misses"] for each in found] == [1, 0], found


def _first_backward(url: str) -> tuple[int, list[float], list[str]]:
    """Train one step; return frames recalled, the gradient, and which compilers were imported."""
    import sys

    import torch

    import s3cache

    weight = torch.nn.Parameter(torch.ones(3))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * weight).sum()

    with s3cache.enabled(url, recall="on") as cache:
        torch.compile(loss)(torch.zeros(3)).backward()
        assert weight.grad is not None
        assert not cache.flush(60).remaining
        compilers = {"torch._inductor.compile_fx", "torch._inductor.scheduler"} & {*sys.modules}
        recalled = int(cache.stats().features["recall"]["recalled"])
        return recalled, weight.grad.tolist(), sorted(compilers)


@slow
@pytest.mark.timeout(900)
def test_the_first_backward_of_a_recalled_frame_needs_no_compiler(tmp_path: Path) -> None:
    job, url = f"{__name__}:_first_backward", remote_url(tmp_path)
    for expected in (0, 1):  # both import torch by themselves
        machine = Machine(tmp_path / f"machine-{expected}")
        recalled, gradient, compilers = machine.run(job, url).result
        assert (recalled, gradient) == (expected, [1.0, 1.0, 1.0])
    assert compilers == []


def _reset_and_drop(url: str) -> int:
    """Recall modules that are deleted after a reset; return the number of recalled frames."""
    import gc

    import torch

    import s3cache

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * self.scale

    with s3cache.enabled(url, recall="on") as cache:
        for _ in range(6):
            module = Scaled()
            compiled = torch.compile(module)
            for _ in range(3):
                compiled(torch.ones(4))
            torch.compiler.reset()
            del module, compiled
            gc.collect()
            for number in range(30):
                torch.compile(lambda x, number=number: x)
        assert not cache.flush(60).remaining
        return int(cache.stats().features["recall"]["recalled"])


@slow
@pytest.mark.timeout(900)
def test_modules_may_be_deleted_after_a_reset(tmp_path: Path) -> None:
    """torch frees its data about a frame; guards of a recalled frame must not use it later."""
    job, url = f"{__name__}:_reset_and_drop", remote_url(tmp_path)
    found = [Machine(tmp_path / f"{each}").run(job, url, server=each).result for each in (0, 1)]
    assert found[1] >= 6


def _call_layers(url: str, count: int) -> dict[str, int]:
    """Compile layers that share code and graph and differ in a constant; return counts."""
    import torch

    import s3cache

    class Layer(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x if self.name else x

    with (
        s3cache.enabled(url, recall="on") as cache,
        torch._dynamo.config.patch(recompile_limit=count),
    ):
        for number in range(count):
            torch.compile(Layer(f"layer {number}"))(torch.ones(2, 2))
        assert not cache.flush(60).remaining
        counts = cache.stats().features["recall"]
    return {name: int(counts[name]) for name in ("recalled", "traced", "saved")}


@slow
@pytest.mark.timeout(900)
def test_each_of_many_variants_of_a_frame_is_recalled(tmp_path: Path) -> None:
    job, url = f"{__name__}:_call_layers", remote_url(tmp_path)
    first, second = (Machine(tmp_path / f"{n}").run(job, url, 20, server=n).result for n in (0, 1))
    assert first == {"recalled": 0, "traced": 20, "saved": 20}
    assert second == {"recalled": 20, "traced": 0, "saved": 0}


# -- a miss of a frame is explained by the part of its key that differs, or by what was read


def _misses(url: str, options: dict[str, bool], sizes: list[int]) -> list[list[str]]:
    """Compile a function for each size; return the explanations of its frames."""
    import torch

    import s3cache

    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with (
        s3cache.enabled(url, recall="on", job_profiles=False) as cache,
        torch._dynamo.config.patch(options),
    ):
        for size in sizes:
            torch.compile(square)(torch.ones(size, size))
        cache.flush(30)
        explained = s3cache.explain().explanations
    return [[each.record.reason, each.line] for each in explained if each.record.kind == "recall"]


@slow
def test_the_label_that_differs_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote?create=1"
    found = [
        Machine(tmp_path / name).run(f"{__name__}:_misses", url, options, sizes, server=0).result
        for name, options, sizes in (
            ("one", {}, [4]),
            ("two", {"specialize_float": True}, [4]),
            ("three", {}, [5]),
        )
    ]
    (first,), ((reason, line),), (other,) = found
    assert first[0] == reason == "absent"
    assert "dynamo.config" in line
    assert other == ["guard", "size of L['x']"]
