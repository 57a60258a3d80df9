"""A graph's devices decide which facts about the machine are in its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import symbolic_trace

import tests.support.compiler  # noqa: F401
from s3cache.graph import key_of
from s3cache.graph._key import COMPONENTS, build_of_torch
from s3cache.torch_api import internals

PROCESSOR = {"machine.isa", "torch.cpu_capability"}


def components(device: str, function: Any = torch.relu, **options: Any) -> set[str]:
    """Return the names of the key's components if a graph calls ``function`` on ``device``."""
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, device=device)
    graph = symbolic_trace(lambda x: function(x))
    for node in graph.graph.nodes:
        node.meta["val"] = x
    with config.patch(**options):
        details = internals.details_of.get()(graph, [x], {}, [])
        key = key_of(details, internals.fx_pickler.get()(graph), lambda _: None)
    assert not isinstance(key, list), key
    return set(key.components)


CONSTANT = torch.ones(4)


def test_a_graph_depends_on_the_processor_only_if_it_may_have_code_for_it() -> None:
    """A graph on the processor does not depend on Triton either, even if it is installed."""
    mixed: list[Any] = [lambda x: x + torch.zeros(4, device="cpu"), lambda x: x.to("cpu")]
    for function in (*mixed, lambda x: x + CONSTANT):
        assert components("cuda", function) >= PROCESSOR
    assert not components("cuda") & PROCESSOR
    assert components("cuda", cpp_wrapper=True) >= PROCESSOR
    assert components("cpu") >= PROCESSOR
    assert not components("cpu") & {"machine.accelerator", "triton.environment"}


def test_the_digest_of_torchs_build_does_not_depend_on_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = torch.__config__.show()
    assert "CPU capability" in shown
    digests = set()
    for capability in ("AVX2", "AVX512"):
        text = f"CPU capability usage: {capability}"
        lines = [text if "CPU capability" in line else line for line in shown.splitlines()]
        monkeypatch.setattr(torch.__config__, "show", lambda lines=lines: "\n".join(lines))
        build_of_torch.cache_clear()
        digests.add(build_of_torch())
    build_of_torch.cache_clear()
    assert len(digests) == 1


@pytest.mark.parametrize("scope", ["aot", "fx", "settings"])
def test_a_digest_has_each_component_once_and_keys_md_has_all_of_them(scope: str) -> None:
    names = [name for name, scopes, _ in COMPONENTS if scope in scopes]
    assert len(set(names)) == len(names)
    page = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")
    unlisted = [name for name in names if f"`{name}`" not in page]
    # For a graph, torch's own details contain the autocast state.
    assert unlisted == (["autocast"] if scope == "settings" else [])
