"""torch's own switches have the same meaning with s3cache as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import s3cache
from s3cache import frame
from tests.hooks.jobs import machine_here
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

HIT = {"hit": 1, "torch hit": 1}
COLD = {"miss": 1, "saved": 1, "torch miss": 1, "torch saved": 1, "miss fx": 1}


def test_each_switch(site: Site) -> None:
    """The counts of torch and of s3cache agree."""
    found = site.machine("one").run("switches:switches", site.url)
    steps = found["steps"]
    assert steps["cold"] == COLD
    assert steps["warm"] == HIT
    assert steps["force_disable_caches"] == {}
    # The second level continues.
    assert steps["enable_autograd_cache=False"] == {"hit fx": 1}
    assert steps["enable_autograd_cache=False again"] == {"hit fx": 1}
    assert steps["fx_graph_cache=False"] == {"bypass": 1, "torch bypass": 1}
    # A fresh cache, which is torch's own at both levels.
    assert steps["fresh_cache"] == {"torch miss": 1, "torch saved": 1, "miss fx": 1}
    assert steps["fresh_cache again"] == {"torch hit": 1, "hit fx": 1}
    assert steps["after fresh_cache"] == HIT
    assert steps["tag"] == COLD
    assert steps["tag again"] == HIT
    assert steps["no tag"] == HIT
    assert steps["strict_autograd_cache"] == HIT
    assert steps["strict_autograd_cache bypass"] == {"bypass": 1, "torch bypass": 1}
    assert "FX graph cache" in found["raised"]

    # s3cache steps aside only inside fresh_cache(), unless it was enabled there.
    assert found["moved"]["moved"] == {"local": 1, "remote": 0}
    assert found["moved"]["inside"] == {"local": 1, "remote": 0}
    assert found["moved"]["after"] == {"local": 2, "remote": 0}


MISS = {"absent": 1, "absent fx": 1, "saved": 1, "saved fx": 1}
HALF = {"bypass": 1, "absent fx": 1, "saved fx": 1}


@slow
def test_switches_of_torchs_remote_caches(site: Site) -> None:
    """``False`` turns the remote tier off; ``True`` without a local cache leaves only that tier."""
    machine = site.machine("one", S3CACHE_RECALL="off")  # uploads are counted
    written, alone, remote = machine.run("switches:remote_switches", site.url)
    assert written["steps"] == {"whole": MISS, "half": HALF}
    assert alone["steps"] == {
        "both out": MISS,
        "both out again": {"local": 1},
        "both out, a half": HALF,
        "whole graphs out": MISS,
        "neither": MISS,
    }
    # Whole graphs stay here, and their FX graphs are shared, as with torch alone.
    assert alone["uploaded"] == [0, 1, 3]
    entries = site.entries(halves=True)
    added = [path for path in entries if str(path) not in written["entries"]][:3]
    kinds = [frame.decode(path.read_bytes()).header.kind for path in added]
    assert sorted(kinds) == ["aot", "fx", "fx"]

    assert remote["steps"] == {
        "there": {"remote": 1},
        "there again": {"remote": 1},
        "not there": MISS,
        "uploaded": {"remote": 1},
        "there, a half": {"bypass": 1, "remote fx": 1},
        "there again, a half": {"bypass": 1, "remote fx": 1},
        "not there, a half": HALF,
        "uploaded, a half": {"bypass": 1, "remote fx": 1},
        "local too": {"local": 1},
    }
    assert not remote["by torch"]


# -- a miss waits, compiles at once, or is an error


def test_a_program_that_must_not_compile_ends_at_its_first_miss(site: Site) -> None:
    """The error names the graph, the nearest entry, and the difference."""
    calls = ([8], "wait"), ([8, 24], "error")
    (first,), (found, missed) = site.machine("one").run("test_switches:steps", site.url, calls)
    assert isinstance(first, float)
    assert found == first
    assert "on_miss is error" in missed
    assert "test_switches.py:" in missed
    assert "nearest:" in missed
    assert "24" in missed


def test_the_error_is_about_the_level_that_missed(site: Site) -> None:
    """A graph that is not cached as a whole hits at the second level, or misses there."""
    calls = ([8], "compile", "doubled"), ([8, 24], "error", "doubled")
    (first,), (found, missed) = site.machine("one").run("test_switches:steps", site.url, calls)
    assert isinstance(first, float)
    assert found == first
    assert "miss: FX graph" in missed
    assert "bypass" not in missed


@nightly
def test_the_error_names_the_operator_that_differs(site: Site) -> None:
    calls = ([8], "compile"), ([8], "error", "tan")
    _, (other,) = site.machine("one").run("test_switches:steps", site.url, calls)
    assert "tan" in other
    assert len(site.entries()) == 1


# -- a program that must not compile: ``on_miss=error``


@torch.library.custom_op("s3cache_switches::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda _, grad: grad * 2)


def steps(url: str, calls: list[list[Any]]) -> list[list[Any]]:
    """Run each call of :func:`step` on a machine of its own."""
    return [step(url, f"{number}", *call) for number, call in enumerate(calls)]


@torch._inductor.config.patch(fallback_by_default=True)  # so that no C++ is compiled
def step(url: str, name: str, sizes: list[int], on_miss: str, operator: str = "sin") -> list[Any]:
    """Run a training step of each size; return the sum of its gradient, or its error."""
    found: list[Any] = []
    with machine_here(url, name, on_miss=on_miss) as cache:

        @torch.compile(dynamic=False)
        def function(x: Any) -> Any:
            return getattr(torch, operator, doubled)(x).cos() * x

        for size in sizes:
            x = torch.linspace(0, 1, size, requires_grad=True)
            try:
                function(x).sum().backward()
                assert x.grad is not None
                found.append(round(float(x.grad.sum()), 4))
            except Exception as exc:
                cause: BaseException | None = exc
                while cause is not None and not isinstance(cause, s3cache.MissError):
                    cause = cause.__cause__ or getattr(cause, "inner_exception", None)
                found.append(str(cause))
        cache.flush(60)
    return found
