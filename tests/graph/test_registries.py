"""Keys contain what programs register with Inductor, and not what torch registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.decomposition import decompositions
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.pattern_matcher import Arg, CallFunction, register_graph_pattern
from torch._inductor.virtualized import V
from torch._subclasses.fake_impls import register_op_impl

from s3cache.graph._describe import UnidentifiedError
from s3cache.graph._overrides import registered_overrides, unused_kept
from s3cache.torch_api import installed_release, internals
from tests.graph.checking import checked, key_of
from tests.support.marks import slow
from tests.support.scripts import run_script


def lines() -> list[str]:
    """Return the place of each registration that is not torch's own."""
    found = [each.place for each in registered_overrides()]
    return sorted([*found, *unused_kept()])


_SIN = torch.ops.aten.sin.default


def pattern(by: float, where: Any = post_grad.pass_patterns[1]) -> None:
    @register_graph_pattern(CallFunction(_SIN, Arg()), pass_dict=where)
    def handler(match: Any, x: Any) -> None:
        match.replace_by_example(lambda x: x * by, [x])


def early_pattern(by: float) -> None:
    pattern(by, joint_graph.early_patterns)


def backend(by: float) -> None:
    class Scheduling(CppScheduling):
        def codegen_node(self, node: Any) -> Any:
            return super().codegen_node(node * by)

    common.register_backend_for_device("cpu", Scheduling, PythonWrapperCodegen)


def operations(by: float) -> None:
    class Overrides(common.DeviceOpOverrides):
        def device_guard(self, device_idx: int) -> str:
            return f"{by * device_idx}"

    common.register_device_op_overrides("cpu", Overrides())


def choices(by: float) -> None:
    class Choices(InductorChoices):
        def should_use_cooperative_reduction(self, features: Any) -> bool:  # type: ignore[override]
            return bool(features.numel > by)

    V.set_choices_handler(Choices())


def side_effect(by: float) -> None:
    torch.fx.node.has_side_effect(lambda x: x * by)


def fake_rule(by: float) -> None:
    @register_op_impl(lambda operator: operator is _SIN)
    def sized(mode: Any, operator: Any, x: Any) -> Any:
        return x.new_empty(int(by))


WAYS = [pattern, early_pattern, backend, operations, choices, side_effect, fake_rule]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore all registries after each test."""
    common.init_backend_registration()
    common.get_device_op_overrides("cpu")  # they register once per process
    tables: list[Any] = [common.device_codegens, common.device_op_overrides_dict]
    tables += [common.custom_backend_passes, internals.fake_rules.get()]
    tables += [torch.fx.node._side_effectful_functions]
    tables += [one.patterns for _, one in internals.pattern_passes()]
    tables += [
        entries for _, one in internals.pattern_passes() for entries in one.patterns.values()
    ]
    before, handler = [(table, table.copy()) for table in tables], V.choices
    yield
    for table, content in before:
        table.clear()
        (table.extend if isinstance(table, list) else table.update)(content)
    V.set_choices_handler(handler)


def test_registrations_of_torch_are_not_reported() -> None:
    """Before the first compile, and with all of torch's patterns and backends registered."""
    assert lines() == []
    torch._inductor.fx_passes.post_grad.lazy_init()
    joint_graph.lazy_init()
    common.get_device_op_overrides("cpu")
    assert len(common.device_codegens) > 3
    assert sum(len(one.patterns) for _, one in internals.pattern_passes()) > 50
    assert lines() == []


@pytest.mark.parametrize("register", WAYS, ids=lambda each: each.__name__)
def test_registrations_of_a_program_are_reported(register: Callable[[float], None]) -> None:
    """A code generator outside any distribution has no identity."""
    register(2.0)
    (line,) = lines()
    for reason in checked().reasons:
        assert reason.code == (
            "override" if register in (early_pattern, fake_rule) else "generator"
        )
        assert line.split(" ")[0] in reason.message
    assert (key_of() is None) == (register is not side_effect)


def test_registrations_of_a_library_are_in_the_key(install: Callable[[str], Any]) -> None:
    source = "def of(by): return lambda match, x: match.replace_by_example(lambda x: x * by, [x])"
    library = install(source)
    found = []
    for numbers in ((2.0,), (3.0,), (2.0, 3.0), (3.0, 2.0), (2.0,)):
        where = post_grad.pass_patterns[1]
        for by in numbers:
            register_graph_pattern(CallFunction(_SIN, Arg()), pass_dict=where)(library.of(by))
        found.append(key_of())
        where.patterns["call_function", _SIN].clear()
    assert found[0] == found[4]
    assert len({None, *found}) == 5


def test_decompositions_matter_to_all_graphs_if_a_pattern_adds_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    operator = torch.library.custom_op("s3cache::added", doubled, mutates_args=())
    monkeypatch.setitem(decompositions, operator._opoverload, doubled)
    assert lines() == []
    pattern(2.0)
    assert lines()[0] == "torch._inductor.decomposition s3cache.added.default"


def test_a_pattern_with_the_default_repr_has_no_identity() -> None:
    class Odd(CallFunction):
        def __repr__(self) -> str:
            return object.__repr__(self)

    register_graph_pattern(Odd(_SIN, Arg()), pass_dict=post_grad.pass_patterns[1])(print)
    with pytest.raises(UnidentifiedError, match="pattern in post_grad"):
        lines()


_KEYS = """
import torch
from torch._inductor.codegen import common

import s3cache

def key():
    (graph,) = s3cache.check(torch.compile(lambda x: x.sin() @ x), torch.ones(4, 4)).graphs
    return graph.key

first, devices = key(), len(common.device_codegens)
common.init_backend_registration()
print(first is not None and first == key(), devices, len(common.device_codegens) > 3)
"""


@slow
@pytest.mark.skipif(
    installed_release() >= (2, 15), reason="this torch registers them before it asks for a key"
)
def test_a_key_does_not_import_torchs_backends(tmp_path: Path) -> None:
    """To import them takes longer than the key. The key is the same with them imported."""
    assert run_script(_KEYS, tmp_path).stdout.split() == ["True", "0", "True"]


def test_a_pass_of_a_backend_is_reported_with_its_device() -> None:
    """torch's own key is the same for a pass of one device and for that of another."""
    devices = list(common.custom_backend_passes)
    passes: list[str | None] = [None] * len(devices)
    assert internals.passes_by_device(passes) == {}
    passes[2] = "uuid"
    assert internals.passes_by_device(passes) == {devices[2]: "uuid"}
    with pytest.raises(ValueError, match="shorter"):
        internals.passes_by_device(passes[1:])
