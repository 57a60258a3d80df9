"""Settings that do not change compiled code do not change keys, so entries are shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch._inductor.codecache import FxGraphHashDetails

from s3cache.torch_api import installed_release
from tests.graph.checking import checked, sine
from tests.graph.programs import Squared
from tests.support.switches import threads


def key_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the key of the only graph of ``function``."""
    graph = checked(function, *args)
    assert graph.key is not None, graph.reasons
    return graph.key


def squared(x: torch.Tensor) -> Any:
    return Squared.apply(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("program", [sine, squared])
def test_torchs_switch_for_custom_functions_changes_no_key(program: Callable[..., Any]) -> None:
    """Custom functions are cached with and without the switch."""
    x = torch.ones(3, requires_grad=True)
    with functorch.patch(autograd_cache_allow_custom_autograd_functions=True):
        allowed = key_of(program, x)
    assert key_of(program, x) == allowed


def flex(device: str) -> str:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 2, 128, 16, device=device)
    return key_of(flex_attention, q, q, q)


def plain(device: str) -> str:
    return key_of(sine, torch.ones(3, device=device))


on_meta = pytest.param(
    plain,
    "meta",
    {},
    "aaa",
    marks=pytest.mark.skipif(
        not hasattr(FxGraphHashDetails, "_may_generate_cpu_cpp_code"),
        reason="this torch does not ask whether a graph has code for the processor",
    ),
)


@pytest.mark.parametrize(
    ("key", "device", "options", "wanted"),
    [
        (plain, "cpu", {}, "abc"),
        on_meta,
        (plain, "cpu", {"cpp.threads": 2}, "aaa"),
        # Code for one thread works with one thread only.
        (plain, "cpu", {"cpp.dynamic_threads": True}, "abb"),
        # Templates split work among a fixed number of threads under any options.
        (plain, "cpu", {"cpp.dynamic_threads": True, "max_autotune": True}, "abc"),
        (flex, "cpu", {"cpp.dynamic_threads": True}, "abc"),
    ],
)
def test_keys_with_one_two_and_three_threads(
    key: Callable[[str], str], device: str, options: dict[str, Any], wanted: str
) -> None:
    """Equal letters in ``wanted`` mean equal keys."""
    found = []
    for count in (1, 2, 3):
        with threads(count), inductor.patch(options):
            found.append(key(device))
    assert "".join("abc"[list(dict.fromkeys(found)).index(each)] for each in found) == wanted


@pytest.mark.skipif(installed_release() < (2, 12), reason="this torch leaves it out of its key")
def test_options_that_only_print_do_not_matter_but_provenance_does(tmp_path: Path) -> None:
    """Among them those of ``TORCH_COMPILE_DEBUG``; ``INDUCTOR_PROVENANCE`` sets its own alone."""
    provenance = {"trace.provenance_tracking_level": 1}
    debugging = {"trace.enabled": True, "trace.debug_dir": str(tmp_path), **provenance}
    found = []
    for options in (
        {},
        {"verbose_progress": True},
        {"trace.graph_diagram": True},
        debugging,
        provenance,
    ):
        with inductor.patch(options), functorch.patch(debug_partitioner=bool(options)):
            found.append(key_of(sine, torch.ones(3)))
    assert len({*found[:4]}) == 1
    assert found[4] not in found[:4]


def part(start: int, extent: int = 24) -> torch.Tensor:
    return torch.zeros(extent)[start : start + 6]


@torch.no_grad()
def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x.cos()


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (lambda x: x.as_strided((2,), (1,)), 3),
        (lambda x: torch.ops.aten.as_strided.default(x.sin(), [2], [1], 1), 3),
        (lambda x: torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 4), 3),
        (lambda x: torch.as_strided_copy(x, (2,), (1,), 5), 3),
        (sine, 1),
        (lambda x: x.view(2, 3).diagonal() + x.unfold(0, 2, 2).sum(), 1),
        (lambda x: x.mul_(2)[1:].view(5, 1).t(), 1),
        (without_grad, 1),
    ],
)
def test_storage_offsets_of_inputs_matter_to_graphs_with_as_strided(
    function: Callable[[torch.Tensor], Any], keys: int
) -> None:
    assert len({key_of(function, part(*at)) for at in ((0,), (3,), (3, 9))}) == keys
