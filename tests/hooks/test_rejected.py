"""Why an entry under the right key is not used: the failed condition, with the values here."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from s3cache.hooks._rebuild import failing_guards, misfits
from tests.hooks.conditions import NOTHING
from tests.support.marks import slow
from tests.support.sites import Site


@pytest.fixture
def program() -> Iterator[SimpleNamespace]:
    """Two dynamic sizes of ``x``, and three tensors of which two overlap, as torch traces them."""
    import torch
    from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    sizes = []
    for number, size in enumerate((128, 6)):
        source = TensorPropertySource(LocalSource("x"), TensorProperty.SIZE, number)
        symbol = shapes.create_symbol(size, source, DimDynamic.DYNAMIC)
        sizes.append(shapes.create_symintnode(symbol, hint=size, source=source))
    with mode:
        flat = torch.empty(12)
        tensors = [flat[:4], flat[2:6], flat[8:]]
    with tracing(TracingContext(mode)):
        yield SimpleNamespace(
            sizes=sizes, tensors=tensors, sources=[LocalSource(name) for name in "abc"]
        )


def test_a_failing_guard_is_shown_with_the_names_and_sizes_of_the_program(
    program: SimpleNamespace,
) -> None:
    guards = "2 <= L['t0'] and L['t0'] <= 64 and L['t0'] % 2 == 0 and L['t0']*L['t1'] == 4"
    inputs = [object(), *program.sizes, 7]
    assert failing_guards(guards, inputs) == [
        "guard `x.size()[0] <= 64` does not hold: x.size()[0] is 128",
        (
            "guard `x.size()[0]*x.size()[1] == 4` does not hold: "
            "x.size()[0] is 128, x.size()[1] is 6"
        ),
    ]
    assert failing_guards("2 <= L['t0']", inputs) == []


def test_the_explanation_adds_no_guard(program: SimpleNamespace) -> None:
    shapes = program.sizes[0].node.shape_env
    before = [str(guard.expr) for guard in shapes.guards]
    failing_guards("L['t0'] <= 64", program.sizes)
    assert [str(guard.expr) for guard in shapes.guards] == before


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, []),
        ({"guards": [("StorageOverlap", [0, 1], [2])]}, []),
        (
            {"guards": [("StorageOverlap", [], [0, 1])]},
            ["input 0 (a), input 1 (b) share memory in another way in the entry"],
        ),
        (
            {"guards": [("StorageOverlap", [0, 2], [])]},
            ["input 0 (a), input 2 (c) share memory in another way in the entry"],
        ),
        (
            {"guards": [("DuplicateInputs", [0], [1])]},
            ["input 0 (a), input 1 (b) share memory in another way in the entry"],
        ),
        ({"places": "0@0/48 1@2/48 2@8/48"}, []),
        (
            {"places": "0@0/48 1@3/48 2@8/48"},
            [
                (
                    "offsets of inputs in storages are 0@0/48 1@3/48 2@8/48 in the entry, "
                    "0@0/48 1@2/48 2@8/48 here"
                )
            ],
        ),
        (
            {"sizes": [("s0 == 64", {"s0": "L['x'].size()[0]"})]},
            ["guard `x.size()[0] == 64` does not hold"],
        ),
        ({"sizes": [("s0 == 128", {"s0": "L['x'].size()[0]"})]}, []),
        (
            {"sizes": [("s0 == 128", {"s0": "L['y'].size()[0]"})]},
            ["guard `y.size()[0] == 128` does not hold"],
        ),
    ],
)
def test_a_failing_condition_names_the_inputs_of_the_program(
    program: SimpleNamespace, conditions: dict[str, Any], expected: list[str]
) -> None:
    symbol = str(program.sizes[0].node.expr)
    given = {
        **conditions,
        "sizes": [
            (text.replace("s0", symbol), {symbol: named["s0"]})
            for text, named in conditions.get("sizes", ())
        ],
    }
    whole: Any = {**NOTHING, **given}
    assert list(misfits(whole, program.tensors, program.sources)) == expected


@slow
@pytest.mark.timeout(900)
def test_explain_names_the_guard_of_each_entry_that_was_not_used(site: Site) -> None:
    machine = site.machine("one")
    found = machine.run("test_rejected:explained", site.url)
    # The guard of the first entry rejects the size to which the program slices.
    assert found["first"] == []
    (second,) = found["second"]
    assert second["reason"] == "guard"
    (text,) = second["rejected"]
    assert "does not hold: x.size()[1] is 3" in text
    (third,) = found["third"]
    assert third["reason"] == "guard"
    assert any(
        "input 1 (a), input 3 (b) share memory in another way" in each for each in third["rejected"]
    )
    assert "entry 1 under this key: " in found["said"]


# -- the job


def explained(url: str) -> dict[str, Any]:
    """Return misses because of a guard: for a size, for another size, and for views."""
    import torch

    import s3cache

    def function(x: Any) -> Any:
        return x[:, :3] @ x[:3, :]  # AOTAutograd has a branch for a slice of everything

    def changed(a: Any, b: Any) -> Any:
        a.mul_(2)
        return a + b

    said: dict[str, Any] = {}
    for name, size in (("first", 5), ("second", 3)):
        torch._dynamo.reset()
        with s3cache.enabled(url):
            torch.compile(function, dynamic=True)(torch.ones(7, size))
            said[name] = _of_guards(s3cache.explain(remote=False))
    torch._dynamo.reset()
    with s3cache.enabled(url):
        compiled = torch.compile(changed, dynamic=True)
        for behind in (12, 1):
            flat = torch.arange(1.0, 41.0)
            compiled(flat[1:7], flat[1 + behind : 7 + behind])
        explanation = s3cache.explain(remote=False)
    return {**said, "third": _of_guards(explanation), "said": str(explanation)}


def _of_guards(explained: Any) -> list[dict[str, Any]]:
    found = explained.as_dict()["explanations"]
    return [each for each in found if each["level"] == "aot" and each["reason"] == "guard"]
