"""Which graphs may be cached, and each reason why a graph may not."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomKnapsackSolver
from torch.fx import Graph, GraphModule
from torch.fx.experimental._backward_state import BackwardState
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import s3cache
from s3cache.graph import BypassReason, bypass_reasons, extra_cacheable_functions
from s3cache.graph._results import suggested_fix
from s3cache.torch_api import installed_release
from tests.graph.checking import Wrapped, checked


def users_own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def unnamed(*_: object) -> Any: ...


class UsersModule(nn.Module): ...


def graph_of(*calls: tuple[str, Any], modules: dict[str, nn.Module] | None = None) -> GraphModule:
    """Return a graph of these calls; each call gets the result of the call before it."""
    graph = Graph()
    value = graph.placeholder("x")
    value.meta["example_value"] = torch.ones(2)
    for op, target in calls:
        value = graph.create_node(op, target, (value,))
        value.meta["example_value"] = torch.ones(2)
    graph.output(value)
    root = nn.Module()
    for name, module in (modules or {}).items():
        root.add_module(name, module)
    return GraphModule(root, graph)


def reasons_of(gm: GraphModule, *inputs: object, registered: Any = ()) -> list[BypassReason]:
    return bypass_reasons(gm, inputs, lambda each: "1" if each in registered else None)


def codes(gm: GraphModule | None = None) -> list[str]:
    return [each.code for each in reasons_of(gm or SINE)]


SINE = graph_of(("call_function", torch.sin))


# -- nodes


@pytest.mark.parametrize(
    ("call", "code", "target"),
    [
        (("call_function", torch.sin), "", ""),
        (("call_function", torch.nn.functional.relu), "", ""),
        (("call_function", operator.neg), "", ""),
        (("call_function", torch.ops.aten.sin.default), "", ""),
        (("call_function", torch.ops.aten.sin), "", ""),
        (("call_method", "sin"), "", ""),
        (("call_module", "relu"), "", ""),
        (("call_module", "body"), "", ""),
        (("call_function", users_own), "function", f"{__name__}.users_own"),
        # torch's own check accepts any builtin function (pytorch #194658).
        (("call_function", zlib.crc32), "function", "zlib.crc32"),
        (("call_module", "mine"), "module", f"{__name__}.UsersModule"),
        (
            ("call_function", torch.ops.higher_order.wrap_activation_checkpoint),
            "higher-order-op",
            "wrap_activation_checkpoint",
        ),
        # Their result depends on the process, which is in no key.
        (("call_function", torch.cuda.current_device), "function", None),
        (("call_function", torch.distributed.get_rank), "function", None),
        (("call_function", torch.compiler.is_compiling), "function", None),
        (("call_function", torch.utils.data.get_worker_info), "function", None),
    ],
)
def test_functions_and_modules_of_torch_that_read_no_state_are_safe(
    call: tuple[str, Any], code: str, target: str | None
) -> None:
    modules = {"relu": nn.ReLU(), "body": SINE, "mine": UsersModule()}
    gm = graph_of(call, modules=modules)
    for reason in reasons_of(gm):
        assert (reason.code, reason.module) == (code, "")
        assert target in (None, reason.target)
        assert all((reason.node, reason.message, reason.fix))
    assert len(codes(gm)) == bool(code)
    assert reasons_of(gm, registered=(call[1], UsersModule)) == [] or code == "higher-order-op"


def test_functions_of_torch_that_dynamo_puts_into_graphs_are_safe() -> None:
    """Such as for ``torch.func.jvp``, and for attention with named backends."""
    import torch.nn.attention
    from torch._functorch import predispatch
    from torch._functorch._aot_autograd import autograd_cache

    nesting = ["_vmap_increment_nesting", "_vmap_decrement_nesting"]
    if installed_release() >= (2, 12):
        nesting += ["_jvp_increment_nesting", "_jvp_decrement_nesting"]
        nesting += ["_enter_dual_level", "_exit_dual_level"]
    own: list[Any] = [torch.nn.attention._backend_from_string]
    own += [getattr(predispatch, name) for name in nesting]
    gm = graph_of(*(("call_function", each) for each in own))
    assert reasons_of(gm) == []
    more = extra_cacheable_functions(gm)
    with torch._inductor.config.patch(unsafe_marked_cacheable_functions=more):
        autograd_cache.check_cacheable(gm)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x, _: x.meta.clear(), "method"),
        (lambda _, call: setattr(call, "target", zlib.crc32), "method"),
        (lambda _, call: setattr(call, "op", "call_planet"), "node-kind"),
    ],
)
def test_odd_nodes_are_not_safe(change: Any, code: str) -> None:
    gm = graph_of(("call_method", "sin"))
    change(*list(gm.graph.nodes)[:2])
    assert codes(gm) == [code]


@pytest.mark.parametrize("name", ["body", "saved_tensors_hooks_pack_0"])
def test_graphs_inside_a_graph_are_checked(name: str) -> None:
    """torch checks only the outermost graph and hooks for saved tensors."""
    gm = graph_of(("call_function", torch.sin))
    setattr(gm, name, graph_of(("call_function", users_own)))
    (reason,) = reasons_of(gm)
    assert (reason.code, reason.module) == ("function", name)
    assert str(reason).startswith(f"{name}.")


def test_a_wrapped_function_is_safe_if_its_user_gave_a_hash() -> None:
    gm = graph_of(("call_function", users_own))
    node = list(gm.graph.nodes)[1]
    node.meta["is_wrapped"] = True
    assert codes(gm) == ["function"]
    node.meta["user_cache_hash"] = "1"
    assert codes(gm) == []


def test_a_checkpoint_context_needs_a_hash_or_an_identity() -> None:
    def checkpointed(context_fn: Any) -> list[BypassReason]:
        inner = graph_of(("call_function", torch.sin))
        inner.meta["_checkpoint_context_fn"] = context_fn
        return reasons_of(graph_of(("call_module", "body"), modules={"body": inner}))

    hashed = functools.partial(unnamed)
    hashed.cache_hash = "1"  # type: ignore[attr-defined]
    operators = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.mm]
    )
    assert [checkpointed(each) for each in (hashed, operators)] == [[], []]
    (reason,) = checkpointed(unnamed)
    assert (reason.code, reason.module) == ("checkpoint-context", "body")
    assert __file__ in reason.message


def test_nodes_of_compiled_autograd_are_safe_unless_they_call_custom_code() -> None:
    """The suggested fix does not edit torch's own code."""
    node = compiled_autograd.Op("MulBackward0", operator.neg, is_custom_function=False)
    assert codes(graph_of(("call_function", node))) == []
    others = compiled_autograd.Op("CppNodeScale0", operator.neg, is_custom_function=True)

    def make_subclass(x: torch.Tensor) -> torch.Tensor:
        return x

    make_subclass.__module__ = compiled_autograd.__name__  # as if torch had made it for a subclass
    for target in (others, make_subclass):
        (reason,) = reasons_of(graph_of(("call_function", target)))
        assert reason.code == "function"
        assert target.__name__ in reason.message
        assert "outside of compiled autograd" in reason.fix
        assert "register_cacheable" not in reason.fix


# -- suggested fixes


@functools.wraps(torch.nn.functional.gelu)
def wrapping(*args: Any) -> Any:
    return torch.nn.functional.gelu(*args)


def test_a_suggested_fix_can_be_pasted_and_names_the_function() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    @functools.wraps(torch.nn.functional.gelu)
    def inner(*args: Any) -> Any:
        return args

    registered = f"import s3cache, {__name__}; s3cache.register_cacheable({__name__}.{{}}, "
    top: list[Any] = [users_own, wrapping]  # functools.wraps gives the latter torch's name
    for function in top:
        fix = suggested_fix(function)
        assert fix.startswith(registered.format(function.__code__.co_name))
        compile(fix, "pasted", "exec")
    nested: list[Any] = [local, inner]
    for function in nested:
        name = function.__code__.co_name
        assert suggested_fix(function).startswith(
            f"define {name} at the top level of {__name__}, then: "
        )
        assert registered.format(name) in suggested_fix(function)
    assert "your_function" in suggested_fix(lambda x: x)


def test_no_fix_registers_an_object_that_torch_makes_for_each_call() -> None:
    @torch._dynamo.nonstrict_trace
    def kept(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    report = s3cache.check(torch.compile(lambda x: kept(x) + 1), torch.ones(2))
    (reason,) = report.graphs[0].reasons
    assert (reason.code, "nonstrict_trace" in reason.fix) == ("function", True)
    assert "register_cacheable" not in reason.fix


# -- inputs and settings


def test_hooks_for_the_backward_pass_are_not_safe() -> None:
    assert [each.code for each in reasons_of(SINE, torch.ones(1), BackwardState())] == [
        "backward-state"
    ]


class Unwilling(CustomKnapsackSolver):
    def __call__(self, *_: object) -> Any: ...

    def uuid(self) -> None:
        return None


class Known(CustomGraphPass):
    def __call__(self, graph: Graph) -> None: ...

    def uuid(self) -> str:
        return "known"


INDUCTOR = torch._inductor.config
FUNCTORCH = torch._functorch.config


@pytest.mark.parametrize(
    ("config", "setting", "value", "code"),
    [
        (torch.compiler.config, "force_disable_caches", True, "caches-off"),
        (FUNCTORCH, "enable_autograd_cache", False, "caches-off"),
        (INDUCTOR, "fx_graph_cache", False, "fx-graph-cache-off"),
        (INDUCTOR, "aot_inductor.use_runtime_constant_folding", True, "constant-folding"),
        (INDUCTOR, "post_grad_custom_pre_pass", unnamed, "custom-pass"),
        (INDUCTOR, "post_grad_custom_post_pass", [Known(), unnamed], "custom-pass"),
        (INDUCTOR, "joint_custom_pre_pass", unnamed, "custom-callable"),
        (INDUCTOR, "joint_custom_post_pass", unnamed, "custom-callable"),
        (INDUCTOR, "_pre_fusion_custom_pass", unnamed, "custom-pass"),
        (INDUCTOR, "_post_fusion_custom_pass", unnamed, "custom-pass"),
        (INDUCTOR, "_fuse_ddp_communication_passes", [unnamed], "custom-pass"),
        (INDUCTOR, "custom_partitioner_fn", unnamed, "custom-callable"),
        (FUNCTORCH, "joint_custom_pass", unnamed, "custom-callable"),
        (FUNCTORCH, "activation_memory_budget_solver", unnamed, "custom-callable"),
        (FUNCTORCH, "activation_memory_budget_solver", Unwilling(), "custom-callable"),
        (FUNCTORCH, "activation_memory_budget_runtime_estimator", unnamed, "custom-callable"),
    ],
)
def test_settings_that_turn_caching_off(config: Any, setting: str, value: Any, code: str) -> None:
    """Passes that do not generate code have run when the second level looks up a graph."""
    with config.patch({setting: value}):
        (reason,) = reasons_of(SINE)
    assert reason.code == code
    assert reason.blocks_fx_level == (code not in ("custom-callable", "freezing"))
    if code.startswith("custom") and "Unwilling" not in reason.message:
        assert "register_cacheable(tests.graph.test_safety.unnamed, version" in reason.fix
    assert codes() == []


@pytest.mark.skipif(
    not hasattr(INDUCTOR, "pre_grad_pass_timing"), reason="torch 2.11 has no such setting"
)
def test_a_pass_before_autograd_matters_only_if_it_runs_late() -> None:
    for timing, found in (("early", []), ("late", ["custom-callable"])):
        with INDUCTOR.patch(pre_grad_custom_pass=unnamed, pre_grad_pass_timing=timing):
            assert codes() == found


def test_freezing_without_gradients_and_bisecting_are_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first call on fake tensors does not refuse a graph: its entry describes the outputs."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compiler_bisector import CompilerBisector

    with INDUCTOR.patch(freezing=True):
        assert codes() == []
        with torch.no_grad():
            assert codes() == ["freezing"]
    context = TracingContext(None)
    context.fakify_first_call = True
    with tracing(context):
        assert codes() == []
    monkeypatch.setattr(CompilerBisector, "bisection_enabled", True)
    assert codes() == ["bisecting"]


def test_all_reasons_are_listed_and_each_function_once() -> None:
    inner = graph_of(("call_function", users_own), ("call_function", zlib.crc32))
    calls = (("call_function", users_own), ("call_module", "body"), ("call_module", "mine"))
    gm = graph_of(*calls, calls[0], modules={"body": inner, "mine": UsersModule()})
    with INDUCTOR.patch(freezing=True, joint_custom_pre_pass=unnamed), torch.no_grad():
        found = reasons_of(gm)
    listed = ["freezing", "custom-callable", "function", "module", "function"]
    assert [each.code for each in found] == listed
    assert len({(each.module, each.node) for each in found}) == 4  # two have no node


def test_advice_is_about_the_users_code_alone() -> None:
    """Dynamo calls helpers of torch for NumPy's scalars, and item() for tolist()."""
    helper = checked(lambda x, n: x * int(n), torch.ones(3), np.int64(3)).reasons[0]
    assert (helper.code, helper.target) == ("function", "torch._dynamo.utils.wrapped_item")
    assert helper.fix == "call it outside of the compiled region: this code is torch's own"
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        x, y = torch.tensor([1, 2]), torch.ones(4)
        numbers = checked(lambda x, y: y[: x.tolist()[0]], x, y).reasons[0]
        assert numbers.code == "method"
        assert "tolist()" in numbers.message
        assert "x[0].item()" in numbers.fix
        assert checked(lambda x, y: y[: x[0].item()], x, y).cacheable


class Holding(Wrapped): ...


class Guarded:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Guarded:
        return self


def test_advice_to_describe_an_object_names_a_class_of_the_user() -> None:
    s3cache.register_cacheable(Holding, version="1")
    s3cache.register_cacheable(Guarded, version="1")
    x = torch.ones(3)
    (reason,) = checked(torch.sin, Holding(x, Guarded())).reasons
    assert reason.code == "component"
    assert "give tests.graph.test_safety.Guarded a __reduce__" in reason.fix
    (reason,) = checked(torch.sin, Holding(x, weakref.ref(x))).reasons
    assert reason.code == "component"
    assert "__reduce__" not in reason.fix
