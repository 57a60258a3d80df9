"""An entry notes the conditions of its code beside its key; without them, it is never used."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import ConstantSource, LocalSource, TensorProperty, TensorPropertySource
from torch._guards import Guard, GuardEnvExpr, StorageOverlap, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import s3cache
from s3cache.artifact import variant_of
from s3cache.errors import CorruptError
from s3cache.hooks._compiles import FX_INFO, Compile, note_conditions
from s3cache.hooks._rebuild import (
    NotSharableError,
    add_guards,
    conditions_of,
    described,
    failing_guards,
    misfits,
)
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import AOTResult
from tests.support.marks import slow
from tests.support.sites import Site


@dataclass(eq=False)
class Compiling:
    """A compile of a graph with three inputs, in torch's own context."""

    inputs: list[Any]
    sources: list[Any]
    entry: AOTResult
    context: Any
    begun: Compile | None = None
    graphs: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        self.begun = Compile(self.context, "key", self.sources, self.inputs, of_threads=True)

    def noted(self) -> Any:
        note_conditions(self.entry, self.begun)
        return conditions_of(self.entry)


@pytest.fixture
def compiling() -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        flat = torch.empty(12)
        inputs = [flat[:4], flat[2:6], flat[8:]]
    graphs = [SimpleNamespace(result=SimpleNamespace()) for _ in range(2)]
    entry = SimpleNamespace(compiled_fw=graphs[0], compiled_bw=graphs[1])
    context = TracingContext(mode)
    with tracing(context):
        made = Compiling(
            inputs,
            [LocalSource(name) for name in "abc"],
            cast("AOTResult", entry),
            context,
            graphs=[each.result for each in graphs],
        )
        for graph in made.graphs:
            _note(graph)
        made.begin()
        yield made


def _note(graph: object, *, late: bool = False, lowered: str | None = None) -> None:
    setattr(graph, FX_INFO, {"sees_places": False, "late": late, "lowered": lowered})


def test_conditions_distinguish_entries_under_one_key() -> None:
    conditions: Any = dict(NOTHING)
    assert described(conditions) is None
    assert variant_of("guards", None) == variant_of("guards")
    elsewhere: Any = {**NOTHING, "places": "0@1/8"}
    texts = (None, described(elsewhere), "other")
    assert len({variant_of(guards, text) for guards in ("", "a") for text in texts}) == 6


@pytest.mark.parametrize("what", ["unknown guard", "no input", "Dynamo", "FX graph", "settings"])
def test_an_entry_is_not_used_if_a_condition_cannot_be_noted(
    compiling: Compiling, what: str
) -> None:
    context = compiling.context.guards_context
    if what == "unknown guard":
        context.aotautograd_guards.append(GuardEnvExpr())
    elif what == "no input":
        context.aotautograd_guards.append(StorageOverlap([LocalSource("d")], []))
    elif what == "Dynamo":
        context.dynamo_guards.inner.add(Guard(LocalSource("a"), lambda *_: None))
        assert compiling.begun is not None
        compiling.begun.look(compiling.context)
    elif what == "FX graph":
        vars(compiling.graphs[1]).clear()
    else:
        _note(compiling.graphs[1], late=True)
    with pytest.raises(NotSharableError):
        compiling.noted()
    assert conditions_of(compiling.entry) is None


def test_an_entry_with_an_unknown_condition_is_corrupt(compiling: Compiling) -> None:
    _note(compiling.graphs[1], late=True, lowered="digest")
    noted: Any = compiling.noted()
    assert noted["lowered"] == "digest"
    compiling.entry.__dict__["s3cache_conditions"] = {**noted, "more": 1}
    with pytest.raises(CorruptError):
        conditions_of(compiling.entry)


@pytest.mark.parametrize(
    "guard", [("StorageOverlap", [7], []), ("DuplicateInputs", [0, 1], [2]), ("Other", [0], [1])]
)
def test_an_entry_with_guards_that_fit_no_input_is_corrupt(
    compiling: Compiling, guard: tuple[str, list[int], list[int]]
) -> None:
    conditions: Any = {**NOTHING, "guards": [guard]}
    with pytest.raises(CorruptError):
        add_guards(conditions, compiling.sources)
    assert compiling.context.guards_context.aotautograd_guards == []


# -- why an entry under the right key is not used: the failed condition, with the values here


@pytest.fixture
def program() -> Iterator[SimpleNamespace]:
    """Two dynamic sizes of ``x``, and three tensors of which two overlap, as torch traces them."""
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
    found = machine.run("test_conditions:explained", site.url)
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
    return [each for each in found if each["kind"] == "aot" and each["reason"] == "guard"]


# -- a hit evaluates guards on sizes without branches, so that it adds no other guards


_GUARD = "max(8 - min(5, L['t0']), L['t1'] + 2) >= 8 and L['t0'] < max(3, L['t1'], 7)"


@pytest.mark.parametrize("values", list(itertools.product((1, 4, 6, 9), repeat=2)))
def test_branch_free_functions_give_the_same_result(values: tuple[int, int]) -> None:
    names = {"L": {"t0": values[0], "t1": values[1]}}
    assert eval(_GUARD, dict(internals.branch_free()), names) == eval(_GUARD, {}, names)


def test_branch_free_functions_take_numbers_of_sympy() -> None:
    """torch evaluates the strides of outputs with them, also for programs that do not hit."""
    found = eval("max(1, min(s, 5)) * 2", dict(internals.branch_free()), {"s": sympy.Integer(3)})
    assert found == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch's own imports
def test_a_hit_adds_no_guards_for_branches(tmp_path: Path) -> None:
    """Each branch in Python's own functions adds a guard, also once the cache is off again."""
    importlib.import_module(internals.COMPILER)  # the hooks wait for it
    before = _guards_added()
    with s3cache.enabled(local_dir=tmp_path):
        assert _guards_added() == 2
    assert _guards_added() == before > 2


def _guards_added() -> int:
    shapes = ShapeEnv()
    sizes = []
    for number, value in enumerate((4, 6)):
        source = ConstantSource(f"size{number}")
        symbol = shapes.create_symbol(value, source, DimDynamic.DYNAMIC)
        sizes.append(shapes.create_symintnode(symbol, hint=value, source=source))
    assert shapes.evaluate_guards_expression(_GUARD, sizes)
    return len(shapes.guards)


# -- conditions of entries: requirements of their code beside their keys


#: Conditions of an entry that relies on nothing.
NOTHING: dict[str, Any] = {
    "guards": [],
    "sizes": [],
    "places": None,
    "lowered": None,
    "of_threads": True,
}
