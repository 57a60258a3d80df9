"""What does not change the code that a program compiles to changes no key: entries are shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch._inductor.codecache import FxGraphHashDetails

import s3cache
from s3cache.torch_api import installed_release
from tests.graph.programs import Squared
from tests.support.switches import threads


def key_of(function: Callable[..., Any], *args: Any) -> str:
    """The key of the one graph that the function makes."""
    (graph,) = s3cache.check(torch.compile(function), *args).graphs
    assert graph.key is not None, graph.reasons
    return graph.key


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def squared(x: torch.Tensor) -> Any:
    return Squared.apply(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("program", [sine, squared])
def test_torchs_switch_for_custom_functions_makes_no_other_key(program: Callable[..., Any]) -> None:
    """They are cached with it and without."""
    x = torch.ones(3, requires_grad=True)
    with functorch.patch(autograd_cache_allow_custom_autograd_functions=True):
        allowed = key_of(program, x)
    assert key_of(program, x) == allowed


def keys_with_threads(*counts: int, device: str = "cpu", **options: Any) -> list[str]:
    """One for each number of threads."""
    found = []
    for count in counts:
        with threads(count), inductor.patch({f"cpp.{k}": v for k, v in options.items()}):
            found.append(key_of(sine, torch.ones(3, device=device)))
    return found


def test_code_is_made_for_a_number_of_threads() -> None:
    assert len(set(keys_with_threads(1, 2, 3))) == 3


@pytest.mark.skipif(
    not hasattr(FxGraphHashDetails, "_may_generate_cpu_cpp_code"),
    reason="this torch does not ask what a graph has for the processor to do",
)
def test_threads_do_not_matter_where_nothing_is_for_the_processor() -> None:
    assert len(set(keys_with_threads(1, 2, 3, device="meta"))) == 1


def test_threads_do_not_matter_to_code_for_a_number_that_the_user_set() -> None:
    assert len(set(keys_with_threads(1, 2, 3, threads=2))) == 1
    assert keys_with_threads(2, threads=2) != keys_with_threads(2, threads=3)


def test_threads_do_not_matter_to_code_for_any_number_but_one() -> None:
    """Code for one thread lets several do what one alone has to."""
    one, two, three = keys_with_threads(1, 2, 3, dynamic_threads=True)
    assert one != two == three


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_threads_matter_to_templates(option: str) -> None:
    with inductor.patch({option: True}):
        assert len(set(keys_with_threads(2, 3, dynamic_threads=True))) == 2


def test_threads_matter_to_flex_attention() -> None:
    """A template, whatever the options say."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 2, 128, 16)
    found = set()
    for count in (2, 3):
        with threads(count), inductor.patch({"cpp.dynamic_threads": True}):
            found.add(key_of(flex_attention, q, q, q))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("config", "option", "value"),
    [
        (inductor, "autotune_num_choices_displayed", 3),
        (inductor, "developer_warnings", not inductor.developer_warnings),
        (inductor, "verbose_progress", True),
        (functorch, "debug_partitioner", True),
        (inductor, "trace.graph_diagram", True),
    ],
)
def test_what_only_prints_does_not_matter(config: Any, option: str, value: Any) -> None:
    with config.patch({option: value}):
        printing = key_of(sine, torch.ones(3))
    assert printing == key_of(sine, torch.ones(3))


@pytest.mark.skipif(installed_release() < (2, 12), reason="this torch leaves it out of its key")
def test_debugging_does_not_matter_and_asking_for_provenance_does(tmp_path: Path) -> None:
    """What ``TORCH_COMPILE_DEBUG`` sets, and ``INDUCTOR_PROVENANCE`` by itself."""
    provenance = {"trace.provenance_tracking_level": 1}
    debugging = {"trace.enabled": True, "trace.debug_dir": str(tmp_path), **provenance}
    found = []
    for options in ({}, debugging, provenance):
        with inductor.patch(options):
            found.append(key_of(sine, torch.ones(3)))
    assert found[0] == found[1] != found[2]


def part(start: int, extent: int = 24) -> torch.Tensor:
    return torch.zeros(extent)[start : start + 6]


def test_where_inputs_begin_matters_to_graphs_that_name_places_in_storages() -> None:
    named: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda x: x.as_strided((2,), (1,)),
        lambda x: torch.as_strided(x, (2,), (1,), 5) + 1,
        lambda x: torch.ops.aten.as_strided.default(x.sin(), [2], [1], 1),
        lambda x: torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 4),
        lambda x: torch.as_strided_copy(x, (2,), (1,), 5),
    )
    for function in named:
        assert len({key_of(function, part(*at)) for at in ((0,), (3,), (3, 9))}) == 3


@torch.no_grad()
def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x.cos()


def test_where_inputs_begin_matters_to_no_others() -> None:
    others: tuple[Callable[[torch.Tensor], Any], ...] = (
        sine,
        lambda x: x.view(2, 3).diagonal() + x.unfold(0, 2, 2).sum(),
        lambda x: x.mul_(2)[1:].view(5, 1).t(),
        without_grad,
    )
    for function in others:
        assert len({key_of(function, part(*at)) for at in ((0,), (3,), (3, 9))}) == 1


@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching:UserWarning")  # by torch
def test_tensors_inside_of_a_subclass_share_storages_like_others() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.mul_(2) + y

    def keyed(first: torch.Tensor, second: torch.Tensor, other: torch.Tensor) -> str:
        return key_of(function, TwoTensor(first, second), TwoTensor(other, other.clone()))

    flat, other = torch.zeros(12), torch.zeros(6)
    pairs = [
        (part(0), part(0), other),
        (flat[:6], flat[:6], other),
        (flat[:6], part(0), flat[:6]),
    ]
    assert len({keyed(*pair) for pair in pairs}) == len(pairs)
    if installed_release() < (2, 12):
        return  # such a torch takes a subclass with an offset for a tensor with data: a bypass
    assert keyed(part(0), part(0), part(0)) == keyed(part(3), part(3), part(0))
