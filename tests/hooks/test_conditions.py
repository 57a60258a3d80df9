"""An entry notes the conditions of its code beside its key; without them, it is never used."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from s3cache.artifact import variant_of
from s3cache.errors import CorruptError
from s3cache.hooks._compiles import FX_INFO, Compile, note_conditions
from s3cache.hooks._rebuild import NotSharableError, add_guards, conditions_of, described
from s3cache.torch_api.protocols import AOTResult
from tests.hooks.conditions import NOTHING


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
    import torch
    from torch._dynamo.source import LocalSource
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

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


def _note(
    graph: object, *, sees_places: bool = False, late: bool = False, lowered: str | None = None
) -> None:
    noted = {"sees_places": sees_places, "late": late, "lowered": lowered}
    setattr(graph, FX_INFO, noted)


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
    from torch._dynamo.source import LocalSource
    from torch._guards import Guard, GuardEnvExpr, StorageOverlap

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
