"""User code that rewrites graphs is in the key by its identity, or is a bypass reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.output_code import OutputCode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import s3cache
from s3cache.graph import Graph, described_passes, settings_digest
from s3cache.torch_api import installed_release
from tests.graph.checking import checked, key_of

# One option of each kind; test_safety.py has all options.
OPTIONS = [
    (inductor, "post_grad_custom_post_pass"),
    (inductor, "joint_custom_pre_pass"),
    (inductor, "_fuse_ddp_communication_passes"),
    (inductor, "custom_partitioner_fn"),
    (functorch, "activation_memory_budget_solver"),
]
Install = Callable[[str], Any]
LIBRARY = "def of(by): return lambda *args: by"


@pytest.mark.parametrize(("config", "option"), OPTIONS)
def test_the_source_of_a_library_pass_is_in_the_key(
    config: Any, option: str, install: Install
) -> None:
    def key_with(function: Any) -> str | None:
        value = [function] if option.startswith("_fuse") else function
        with config.patch({option: value}):
            key = key_of()
            assert getattr(config, option) == value
        return key

    library = install(LIBRARY)
    first = key_with(library.of(1))
    assert first is not None
    assert key_with(library.of(1)) == first
    assert key_with(library.of(2)) not in (first, None)
    assert key_of() != first


@pytest.mark.skipif(installed_release() < (2, 13), reason="this torch takes one pass")
def test_each_of_several_passes_is_in_the_key(install: Install) -> None:
    class Known(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "known"

    found = set()
    other = install(LIBRARY).of(1)
    for passes in ([Known()], [Known(), other], [other, Known()]):
        with inductor.patch(joint_custom_pre_pass=passes):
            found.add(key_of())
    assert len(found - {None}) == 3


def test_the_stand_in_for_a_pass_runs_the_pass(install: Install) -> None:
    """It may be called meanwhile: until torch 2.12, options apply to the whole process."""
    done = install('def done(graph): return graph, "done"').done
    with inductor.patch(post_grad_custom_pre_pass=done):
        with described_passes():
            seen: Any = inductor.post_grad_custom_pre_pass
            assert seen("graph") == ("graph", "done")
            assert isinstance(seen, CustomGraphPass)
        assert not isinstance(inductor.post_grad_custom_pre_pass, CustomGraphPass)


AT = torch.ops.aten


@pytest.mark.skipif(installed_release() < (2, 13), reason="this torch pickles the function")
def test_the_identity_of_a_checkpoint_context_function_is_in_the_key(install: Install) -> None:
    """Different operators and different overloads give different keys."""

    def key_with(context_fn: Any) -> str | None:
        def function(x: Tensor, w: Tensor) -> Any:
            body = functools.partial(torch.matmul, w)
            return checkpoint(body, x, use_reentrant=False, context_fn=context_fn)

        matrix = torch.ones(3, 3, requires_grad=True)
        return key_of(function, matrix, matrix.detach())

    create = create_selective_checkpoint_contexts
    lists = [[AT.mm.default], [AT.mm.out], [AT.bmm.default], [AT.mm.default, AT.bmm.default]]
    plain = [functools.partial(create, operators) for operators in lists]
    library = install("def of(kept): return lambda *args: args[1] == kept")
    policies = [library.of(op) for op in (AT.mm.default, AT.bmm.default)]
    plain += [functools.partial(create, policy) for policy in policies]
    found = [key_with(context_fn) for context_fn in plain]
    assert len(set(found)) == len(found)
    assert None not in found
    assert key_with(functools.partial(create, [AT.mm.default])) == found[0]
    assert key_with(functools.partial(create, lambda *args: False)) is None


# -- compilers and decompositions


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graph_by(backend: Callable[..., Any] | str) -> Graph:
    program = torch.compile(lambda x: torch.tanh(x) + 1, backend=backend)
    return checked(program, torch.ones(3))


def backend_with(**given: Any) -> Callable[..., Any]:
    return lambda gm, inputs: compile_fx(gm, inputs, **given)


def inner(gm: Any, inputs: Any, **kwargs: Any) -> Any:
    return compile_fx_inner(gm, inputs, **kwargs)


def aot_backend() -> Callable[..., Any]:
    lower: Any = functools.partial(inner, factor=2.0)
    compiler = SerializableAOTDispatchCompiler(OutputCode, lower)
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)


@pytest.mark.parametrize(
    "backend",
    [
        backend_with(inner_compile=inner),
        backend_with(inner_compile=functools.partial(inner, factor=2.0)),
        backend_with(
            decompositions={**select_decomp_table(), torch.ops.aten.tanh.default: lambda x: x * 2}
        ),
        aot_backend(),
    ],
)
def test_user_compilers_keep_a_graph_from_the_first_level(backend: Callable[..., Any]) -> None:
    graph = graph_by(backend)
    assert [reason.code for reason in graph.reasons] == ["custom-callable"]
    assert graph.in_halves


def test_compilers_of_torch_are_in_no_key() -> None:
    usual = graph_by("inductor")
    assert "compile.compilers" not in usual.components
    for given in (
        {},
        {"inner_compile": compile_fx_inner},
        {"decompositions": dict(select_decomp_table())},
    ):
        assert graph_by(backend_with(**given)).key == usual.key


def test_the_version_of_a_registered_compiler_is_in_the_key() -> None:
    (reason,) = graph_by(backend_with(inner_compile=inner)).reasons
    assert "inner_compile" in reason.message
    exec(reason.fix)  # as if a user had pasted it
    first = graph_by(backend_with(inner_compile=inner)).key
    s3cache.register_cacheable(inner, version="2")
    assert None not in (first, second := graph_by(backend_with(inner_compile=inner)).key)
    assert second != first


def test_a_decomposition_keeps_a_graph_from_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In torch's table, and in the copy that torch uses once it has made one."""
    from torch._inductor import decomposition

    def codes() -> list[str]:
        return [reason.target for reason in graph_by("inductor").reasons]

    assert codes() == []
    copied = decomposition.fast_random_decomps()
    for table in (decomposition.decompositions, copied):
        monkeypatch.setitem(table, torch.ops.aten.tanh.default, lambda x: x * 2)
        assert any("aten.tanh.default" in each for each in codes())


def test_settings_with_an_unidentified_pass_have_no_digest() -> None:
    """A backward that another process lowered is then lowered again, with the pass."""

    def digest() -> str | None:
        return settings_digest(of_threads=True, registered_version=lambda _: None)

    assert digest() is not None
    for name in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass"):
        with inductor.patch({name: lambda graph: None}):
            assert digest() is None
