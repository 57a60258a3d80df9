"""Users' code that rewrites graphs is in the key: what it says of itself, or its fingerprint."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import s3cache
from s3cache.torch_api import installed_release

OPTIONS = [
    (inductor, "post_grad_custom_pre_pass"),
    (inductor, "post_grad_custom_post_pass"),
    (inductor, "joint_custom_pre_pass"),
    (inductor, "joint_custom_post_pass"),
    (inductor, "_fuse_ddp_communication_passes"),
    (inductor, "custom_partitioner_fn"),
    (functorch, "joint_custom_pass"),
    (functorch, "activation_memory_budget_solver"),
    (functorch, "activation_memory_budget_runtime_estimator"),
]


def keys(function: Callable[..., Any], *args: Any) -> list[str | None]:
    return [graph.key for graph in s3cache.check(torch.compile(function), *args).graphs]


def sine(x: Tensor) -> Tensor:
    return x.sin() * 2


def written(body: str, **names: Any) -> Any:
    exec(f"def f(*args): {body}", names)
    return names["f"]


@pytest.mark.parametrize(("config", "option"), OPTIONS)
def test_a_pass_that_can_be_told_is_in_the_key_by_its_code(config: Any, option: str) -> None:
    def key_with(function: Any) -> str | None:
        value = [function] if option.startswith("_fuse") else function
        with config.patch({option: value}):
            (key,) = keys(sine, torch.ones(3))
            assert getattr(config, option) == value
        return key

    first = key_with(written("return args[0]"))
    assert first is not None
    assert key_with(written("return args[0]")) == first
    assert key_with(written("return args[1]")) not in (first, None)
    assert key_with(written("return time()", time=time.time)) is None
    assert keys(sine, torch.ones(3)) != [first]


@pytest.mark.skipif(installed_release() < (2, 13), reason="this torch takes one pass")
def test_each_of_several_passes_is_in_the_key() -> None:
    class Known(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "known"

    found = set()
    for passes in ([Known()], [Known(), written("pass")], [written("pass"), Known()]):
        with inductor.patch(joint_custom_pre_pass=passes):
            found |= set(keys(sine, torch.ones(3)))
    assert len(found) == 3
    assert None not in found


def test_what_torch_sees_in_place_of_a_pass_does_what_that_does() -> None:
    """Should it be called meanwhile: torch's options are the process's until 2.12."""
    from s3cache.graph import described_passes

    with inductor.patch(post_grad_custom_pre_pass=lambda graph: (graph, "done")):
        with described_passes():
            seen: Any = inductor.post_grad_custom_pre_pass
            assert seen("graph") == ("graph", "done")
            assert isinstance(seen, CustomGraphPass)
        assert not isinstance(inductor.post_grad_custom_pre_pass, CustomGraphPass)


@pytest.mark.parametrize(("config", "option"), OPTIONS)
def test_an_operator_that_a_pass_names_is_in_the_key_by_what_it_is_made_of(
    config: Any, option: str
) -> None:
    """As it would be if the graph called it."""

    def key_with(function: Any, fake: str) -> str | None:
        library = torch.library.Library("s3cache_passes", "FRAGMENT")
        try:
            library.define("op(Tensor x) -> Tensor")
            library.impl("op", torch.clone, "CPU")
            torch.library.register_fake("s3cache_passes::op", written(fake), lib=library)
            with config.patch({option: [function] if option.startswith("_fuse") else function}):
                (key,) = keys(sine, torch.ones(3))
            return key
        finally:
            library._destroy()

    for body in (
        "return torch.ops.s3cache_passes.op.default",
        "return torch.ops.s3cache_passes.op",
    ):
        function = written(body, torch=torch)
        first = key_with(function, "return args[0].clone()")
        assert first is not None
        assert key_with(function, "return args[0].clone()") == first
        assert key_with(function, "return args[0].t()") not in (first, None)


def test_an_operator_that_a_pass_names_can_be_vouched_for() -> None:
    library = torch.library.Library("s3cache_vouched", "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    fake = written("return args[0] * time()", time=time.time)
    torch.library.register_fake("s3cache_vouched::op", fake, lib=library)
    function = written("return torch.ops.s3cache_vouched.op.default", torch=torch)
    found = []
    with inductor.patch(post_grad_custom_pre_pass=function):
        for version in (None, "1", "2"):
            if version is not None:
                s3cache.register_cacheable(torch.ops.s3cache_vouched.op, version=version)
            found += keys(sine, torch.ones(3))
    assert found[0] is None
    assert len(set(found)) == 3


AT = torch.ops.aten


@pytest.mark.skipif(installed_release() < (2, 13), reason="this torch pickles the function")
def test_a_context_function_is_in_the_key_by_its_code() -> None:
    """Operators differ from one another, and so do their overloads."""

    def key_with(context_fn: Any) -> str | None:
        def function(x: Tensor, w: Tensor) -> Any:
            body = functools.partial(torch.matmul, w)
            return checkpoint(body, x, use_reentrant=False, context_fn=context_fn)

        matrix = torch.ones(3, 3, requires_grad=True)
        (key,) = keys(function, matrix, matrix.detach())
        return key

    create = create_selective_checkpoint_contexts
    lists = [[AT.mm.default], [AT.mm.out], [AT.bmm.default], [AT.mm.default, AT.bmm.default]]
    plain = [functools.partial(create, operators) for operators in lists]
    policies = [written("return args[1] == op", op=op) for op in (AT.mm.default, AT.bmm.default)]
    plain += [functools.partial(create, policy) for policy in policies]
    found = [key_with(context_fn) for context_fn in plain]
    assert len(set(found)) == len(found)
    assert None not in found
    assert key_with(functools.partial(create, [AT.mm.default])) == found[0]
    assert key_with(functools.partial(create, written("return t() > 0", t=time.time))) is None
