"""Kernels that C++ compiles at their first launch (``cpp_wrapper``), in entries and on hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests.support.compiler  # noqa: F401
from s3cache.features.device.kernels import compiled_later, kernel_digest, ready_to_launch
from s3cache.features.device.names import REMEMBERED
from s3cache.features.device.winners import FirstLaunches, left_by_cpp
from s3cache.hooks import has_triton

NAMES = "triton_poi_0", "triton_red_1"
TEXTS = {name: f"\nimport triton\n# {name}\n" for name in NAMES}
SOURCE = "".join(
    f'char* {name}_source = R"TRITON(\nasync_compile.triton({name!r}, {text!r})\n)TRITON";\n'
    for name, text in TEXTS.items()
)
DIGESTS = {name: kernel_digest(text) for name, text in TEXTS.items()}
NOT_LAUNCHED = "compiled when it is launched (cpp_wrapper)"
SEVERAL = "2 configurations"
BEST = {"configs_hash": "of all", "XBLOCK": 1}


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a graph with two kernels, and two directories with files of kernels."""
    from torch._inductor.triton_bundler import TritonBundle

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for directory in "WINNER", "LOSER":
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "kernel.cubin").write_bytes(directory.encode())
    return SimpleNamespace(source_code=SOURCE, _triton_bundle=TritonBundle([], []))


@pytest.fixture
def launch() -> Callable[..., FirstLaunches]:
    """Return a function that launches the second kernel, with the winner that torch remembers."""

    def launched(left: str, remembered: dict[str, object] | None, **meta: object) -> FirstLaunches:
        from torch._inductor.runtime.autotune_cache import AutotuneCache
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        cache: Any = object.__new__(AutotuneCache)
        cache.local_cache = SimpleNamespace(get=lambda path: remembered), "path"
        kernel: Any = object.__new__(CachingAutotuner)
        kernel.kernel_hash = DIGESTS[NAMES[1]]
        config = SimpleNamespace(found_by_combo_autotune=True)
        kernel.launchers = [SimpleNamespace(cache_hash="WINNER", config=config)]
        kernel.triton_meta, kernel.inductor_meta = {"device": 0}, meta
        kernel.save_cache_hook = cache.save
        launches = FirstLaunches()
        launches.note(kernel, {"WINNER", "LOSER"} if left else {"WINNER"}, left)
        return launches

    return launched


def reasons(graph: Any) -> dict[str, str]:
    return dict(left_by_cpp(graph).values())


def directories(graph: Any) -> list[str]:
    return sorted(each.kernel_hash for each in graph._triton_bundle.kernel_artifacts)


def test_a_graph_lacks_all_of_its_kernels_before_their_launch(graph: Any) -> None:
    """torch puts none of them into its bundle."""
    assert compiled_later(SOURCE) == {digest: name for name, digest in DIGESTS.items()}
    assert has_triton(graph)
    assert not has_triton(SimpleNamespace(source_code="call(args)"))
    FirstLaunches().add_to(graph)
    assert reasons(graph) == dict.fromkeys(NAMES, NOT_LAUNCHED)
    assert directories(graph) == []


@pytest.mark.parametrize(("left", "remembered"), [("", None), ("", BEST), (SEVERAL, BEST)])
def test_an_entry_has_the_winner_of_a_kernel_that_was_launched(
    graph: Any, launch: Any, left: str, remembered: dict[str, object] | None
) -> None:
    """The choice may have come with another entry, so that this process made none."""
    launch(left, remembered).add_to(graph)
    assert reasons(graph) == {NAMES[0]: NOT_LAUNCHED}
    assert directories(graph) == ["WINNER"]
    assert getattr(graph, REMEMBERED) == {DIGESTS[NAMES[1]]: remembered or {}}


@pytest.mark.parametrize("why", ["not remembered", "combined"])
def test_an_entry_has_all_configurations_if_no_hit_can_repeat_the_choice(
    graph: Any, launch: Any, why: str
) -> None:
    """For example, a machine without the GPU remembers nothing."""
    groups = {"combo_tuning_groups": [["XBLOCK_0"]]} if why == "combined" else {}
    launch(SEVERAL, None if why == "not remembered" else BEST, **groups).add_to(graph)
    assert reasons(graph) == {NAMES[0]: NOT_LAUNCHED, NAMES[1]: SEVERAL}
    assert directories(graph) == ["LOSER", "WINNER"]


def test_a_kernel_is_waited_for_once() -> None:
    """Each wait for a kernel from a compile worker would load its configurations again."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernel: Any = object.__new__(CachingAutotuner)
    waits = [kernel]
    pending: dict[str, Any] = {NAMES[0]: SimpleNamespace(result=waits.pop)}
    assert ready_to_launch(pending, NAMES[0]) is kernel
    assert ready_to_launch(pending, NAMES[0]) is kernel
    assert pending == {NAMES[0]: kernel}


def test_a_graph_lacks_a_kernel_if_cpp_asks_for_its_assembly(graph: Any, launch: Any) -> None:
    """No entry has the assembly, so a hit with the kernel's files alone would fail."""
    import torch._inductor.config

    with torch._inductor.config.patch({"aot_inductor.emit_multi_arch_kernel": True}):
        launch(SEVERAL, BEST).add_to(graph)
    assert reasons(graph) == dict.fromkeys(NAMES, NOT_LAUNCHED)
    assert directories(graph) == []
