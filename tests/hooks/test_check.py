"""``s3cache.check``: which graphs of a program can be cached, and why others cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import s3cache
import tests.support.compiler  # noqa: F401
from s3cache.hooks._state import Registry

INDUCTOR = torch._inductor.config
FUNCTORCH = torch._functorch.config
COMPILER: Any = torch.compiler.config


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("Inductor was asked to compile")


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    """Make a test fail if it reaches Inductor's own compiler."""
    import torch._inductor.compile_fx

    registry.add(refuse, "1")  # it replaces a code generator
    monkeypatch.setattr(torch._inductor.compile_fx, "_compile_fx_inner", refuse)
    monkeypatch.setattr(torch._inductor.compile_fx, "fx_codegen_and_compile", refuse)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A new registry for each test, so that no registration outlives its test."""
    import s3cache.hooks._session as session

    fresh = Registry()
    monkeypatch.setattr(session.process, "registry", fresh)
    return fresh


@torch._dynamo.allow_in_graph
def users_own(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def program_with_it(x: torch.Tensor) -> torch.Tensor:
    return users_own(x).sin()


def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return torch.sin(x) * by


def only_key(function: Any, *args: Any) -> str:
    (graph,) = s3cache.check(function, *args).graphs
    assert graph.key is not None, graph.reasons
    return graph.key


def test_a_training_module_has_one_graph_with_a_key() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    report = s3cache.check(model, torch.ones(2, 4))
    (graph,) = report.graphs
    assert report.cacheable
    assert graph.cacheable
    assert graph.key is not None
    assert graph.nodes == 6  # input, weight, bias, linear, gelu, output
    assert graph.components["gm"].value == "graph of 6 nodes"
    assert str(report).startswith("1 of 1 graph can be cached\n")


def test_the_key_is_the_key_of_the_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    asked = []

    def lookup(key: str, *_: object) -> None:
        asked.append(key)
        raise KeyboardInterrupt  # far enough

    expected = only_key(scaled, torch.ones(3))
    with monkeypatch.context() as patched, s3cache.enabled(local_dir=str(tmp_path)):
        patched.setattr(AOTAutogradCache, "_lookup", staticmethod(lookup))
        with pytest.raises(KeyboardInterrupt):
            torch.compile(scaled)(torch.ones(3))
    torch._dynamo.reset()
    assert asked == [expected]
    with s3cache.enabled(local_dir=str(tmp_path)):
        assert only_key(scaled, torch.ones(3)) == expected


def test_a_check_runs_the_program_and_may_change_its_arguments() -> None:
    seen = torch.zeros(3)
    s3cache.check(lambda x: x.add_(1), seen)
    assert seen.tolist() == [1, 1, 1]


def test_the_report_has_graph_breaks_and_every_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = users_own(x.sin())
        torch._dynamo.graph_break()
        return y.sin()

    report = s3cache.check(program, torch.ones(3))
    assert [graph.cacheable for graph in report.graphs] == [False, True]
    assert not report.cacheable
    (reason,) = report.graphs[0].reasons
    assert (reason.code, reason.target) == ("function", f"{__name__}.users_own")
    assert report.graphs[0].key is None
    (graph_break,) = report.breaks
    assert graph_break.where.startswith(__file__)
    shown = str(report)
    assert shown.startswith("1 of 2 graphs can be cached\n")
    assert "[function]" in shown
    assert "register_cacheable" in shown
    assert "graph break at" in shown


def test_settings_that_cannot_be_pickled_are_named() -> None:
    with INDUCTOR.patch(external_matmul=[lambda: None]):
        (graph,) = s3cache.check(scaled, torch.ones(3)).graphs
    (reason,) = graph.reasons
    assert (reason.code, reason.target) == ("config", "torch._inductor.config.external_matmul")


def test_a_compiled_module_keeps_its_options() -> None:
    module = torch.compile(nn.Linear(2, 2), options={"epilogue_fusion": False})
    (graph,) = s3cache.check(module, torch.ones(1, 2)).graphs
    assert graph.components["inductor_config"].value == "epilogue_fusion=False"


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_report_has_a_fix_if_torchs_caches_are_off() -> None:
    with FUNCTORCH.patch(enable_autograd_cache=False), COMPILER.patch(force_disable_caches=True):
        (graph,) = s3cache.check(scaled, torch.ones(3)).graphs
        (reason,) = graph.reasons
        assert reason.code == "caches-off"
        assert reason.fix is not None
        exec(reason.fix, {"torch": torch})
        assert s3cache.check(scaled, torch.ones(3)).cacheable


def test_an_error_of_the_program_is_raised_and_torch_is_restored() -> None:
    from torch._functorch._aot_autograd import autograd_cache

    before = dict(vars(autograd_cache)), dict(vars(autograd_cache.AOTAutogradCache))

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(str(x.sum().item()))

    with pytest.raises(ZeroDivisionError):
        s3cache.check(broken, torch.ones(3))
    assert (dict(vars(autograd_cache)), dict(vars(autograd_cache.AOTAutogradCache))) == before
    assert FUNCTORCH.bundled_autograd_cache is False


def test_a_check_counts_no_lookup_and_no_bypass(tmp_path: Path) -> None:
    with s3cache.enabled(local_dir=str(tmp_path)) as cache:
        assert not s3cache.check(program_with_it, torch.ones(3)).cacheable
        assert s3cache.check(scaled, torch.ones(3)).cacheable
        stats = cache.stats()
    assert (stats.bypassed, dict(stats.misses), sum(stats.hits.values())) == (0, {}, 0)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="other versions have other details"
)
def test_every_component_and_every_reason_is_documented() -> None:
    from s3cache.graph import Code

    docs = Path(__file__).parents[2] / "docs"
    (graph,) = s3cache.check(scaled, torch.ones(3)).graphs
    for page, names in (("keys.md", graph.components), ("compile-cache.md", get_args(Code))):
        text = (docs / page).read_text(encoding="utf-8")
        assert [name for name in names if f"`{name}`" not in text] == []
