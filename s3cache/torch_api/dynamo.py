"""Dynamo and the compile under way: sizes and guards on them, profiles, traces."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from s3cache.torch_api import AnyClass, AnyFunction, AnyObject, Fields, Flag, Internal, Predicate
from s3cache.torch_api.inductor import LOCKDOWN
from s3cache.torch_api.protocols import (
    Config,
    Function,
    RuntimeMetadata,
    ShapeState,
    TracingContext,
)

if TYPE_CHECKING:
    from torch import SymInt, Tensor

# Features that fail alone: what they need of torch is declared with their names.

PROFILES = "sharing which sizes change (shape_profile)"
WATCHING = "watching a program for s3cache check and warm"

_SHAPES = "torch.fx.experimental.symbolic_shapes"
_FAKE = "torch._subclasses.fake_tensor"

# -- the compile that is under way

current_tracing_context = Internal[Callable[[], TracingContext | None]](
    "torch._guards:TracingContext.try_get"
)
tracing = AnyFunction("torch._guards:tracing")
tracing_context = AnyFunction("torch._guards:TracingContext")
fake_mode = AnyFunction(f"{_FAKE}:FakeTensorMode")
fake_tensor: Internal[type[Tensor]] = Internal(f"{_FAKE}:FakeTensor")
shape_env = AnyFunction(f"{_SHAPES}:ShapeEnv")
source = AnyClass("torch._guards:Source")
device_mesh = AnyClass("torch.distributed.device_mesh:DeviceMesh")
#: An object that a graph takes, as tracing sees it, and the real one behind it.
script_object = AnyClass("torch._library.fake_class_registry:FakeScriptObject")
(REAL_OBJECT,) = Fields("torch._library.fake_class_registry:FakeScriptObject.__init__", "real_obj")
is_wrapper_subclass = Predicate("torch.utils._python_dispatch:is_traceable_wrapper_subclass")
without_modes = AnyFunction("torch.utils._python_dispatch:_disable_current_modes")
Fields("torch._guards:TracingContext", TracingContext)
Fields("torch._guards:GuardsContext", "dynamo_guards aotautograd_guards")
Fields("torch._guards:Source", "name")
Fields(f"{_FAKE}:FakeTensorMode", "shape_env from_tensor")
Fields(f"{_SHAPES}:TrackedFake", "fake symbolic_context")
Fields(f"{_SHAPES}:StatelessSymbolicContext", "constraint_sizes")
Fields(f"{_SHAPES}:StrictMinMaxConstraint", "vr")
Fields("torch.utils._sympy.value_ranges:ValueRanges", "lower upper")


def name_of_source(source: Any) -> str | None:
    """Return where an input comes from, as Python would write it; ``None`` if that is not known."""
    try:
        return str(source.name() if callable(source.name) else source.name)
    except Exception:  # noqa: BLE001 - some have no such thing, and say so in their own ways
        return None


# -- sizes, and guards on them

unbacked_symbols = AnyFunction(f"{_SHAPES}:free_unbacked_symbols")
_expression_printer = AnyClass(f"{_SHAPES}:SymExprPrinter")
#: What guards on sizes call, by the names that they are printed with.
guard_functions = Internal[dict[str, object]](f"{_SHAPES}:SYMPY_INTERP")
Fields(f"{_SHAPES}:ShapeGuard", "expr")
Fields(
    f"{_SHAPES}:ShapeEnv",
    """guards var_to_sources backed_var_to_val tracked_fakes deserialize_symexpr suppress_guards
    evaluate_guards_expression""",
)


def shape_guards(context: TracingContext) -> Sequence[Any]:
    """Return the guards on sizes that there are so far in a compile."""
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return () if shapes is None else cast("Sequence[Any]", shapes.guards)


def named_symbols(context: TracingContext, symbols: Iterable[object]) -> dict[str, str] | None:
    """Return what each symbol is the size of; ``None`` if that is not known of one."""
    known = context.fake_mode.shape_env.var_to_sources
    named = {str(each): name_of_source(next(iter(known.get(each) or ()), None)) for each in symbols}
    return None if None in named.values() else cast("dict[str, str]", named)


def are_named(context: TracingContext, named: Mapping[str, str]) -> bool:
    """Return whether symbols of those names stand for these sizes in what is compiled for now."""
    symbols = context.fake_mode.shape_env.var_to_sources
    return named_symbols(context, [each for each in symbols if str(each) in named]) == {**named}


def value_of_symbol(context: TracingContext, expression: str) -> int | float | bool:
    """Evaluate a symbol, or an expression of some, with the sizes that are compiled for now.

    It adds no guard (torch's own would, until 2.14).
    """
    sizes = context.fake_mode.shape_env.backed_var_to_val
    values = {str(symbol): size for symbol, size in sizes.items()}
    # What torch printed, out of a verified entry, as torch evaluates it when it adds the guard.
    return cast("int | float | bool", eval(expression, guard_functions.get(), values))  # noqa: S307


def branch_free() -> dict[str, object]:
    """Return ``min`` and ``max`` for guards on sizes, without a guard on which size it is.

    Python's own take a branch: calls that the code of a hit is right for would be compiled again.
    """
    import torch

    return {
        "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
        "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
    }


def guard_on_sizes(context: TracingContext, expression: str) -> None:
    """Have a guard checked that holds of the sizes that are compiled for now."""
    if not context.fake_mode.shape_env.deserialize_symexpr(expression):
        raise ValueError(f"{expression} does not hold")


def written(expression: object) -> str:
    """Return an expression over sizes as text that ``ShapeEnv.deserialize_symexpr`` reads."""
    return str(_expression_printer.get()().doprint(expression))


def symbols_of(inputs: Sequence[object]) -> frozenset[object]:
    """Return the symbols that are inputs of a graph: torch's entries have guards on these."""
    import torch

    numbers = (value.node.expr for value in inputs if isinstance(value, torch.SymInt))
    return frozenset(symbol for symbol in numbers if getattr(symbol, "is_symbol", False))


def sizes_among(inputs: Sequence[object]) -> list[SymInt]:
    """Return the inputs that guards in torch's entries are about, in the order of their numbers."""
    import torch

    sizes = [value for value in inputs if isinstance(value, torch.SymInt)]
    return [size for size in sizes if size.node.hint is not None]


def name_of_size(size: SymInt) -> str | None:
    """Return what the program calls a size, as ``L['x'].size()[0]``, if torch knows."""
    sources = size.node.shape_env.var_to_sources.get(size.node.expr)
    return name_of_source(sources[0]) if sources else None


def holds_of_sizes(guards: str, sizes: Sequence[SymInt], values: Sequence[int]) -> bool:
    """Return whether guards of an entry of torch's hold of sizes that are ``values`` now."""
    if not sizes:
        return False
    return bool(sizes[0].node.shape_env.evaluate_guards_expression(guards, values))


# -- guards on inputs that AOTAutograd finds while it compiles, and Dynamo is to check

_duplicate_inputs = AnyClass("torch._guards:DuplicateInputs")
_storage_overlap = AnyClass("torch._guards:StorageOverlap")
_overlapping = AnyFunction("torch._C._dynamo.guards:compute_overlapping_tensors")
Fields("torch._guards:DuplicateInputs", "input_source_a input_source_b")
Fields("torch._guards:StorageOverlap", "overlapping_sources non_overlapping_sources")


def sources_of_guard(guard: object) -> tuple[str, list[object], list[object]] | None:
    """Return the kind of a guard of AOTAutograd's and its inputs; ``None`` for another kind."""
    kind, fields = type(guard).__name__, getattr(guard, "__dict__", {})
    if type(guard) is _duplicate_inputs.get():
        return kind, [fields["input_source_a"]], [fields["input_source_b"]]
    if type(guard) is _storage_overlap.get():
        return kind, [*fields["overlapping_sources"]], [*fields["non_overlapping_sources"]]
    return None


def guard_holds(
    context: TracingContext, kind: str, some: Sequence[object], others: Sequence[object]
) -> bool:
    """Return whether a guard on these inputs holds; nothing is guarded because of this."""
    if kind == "DuplicateInputs":
        return some[0] is others[0]
    with context.fake_mode.shape_env.suppress_guards():
        found = _overlapping.get()([*some, *others], symbolic=True)
    return bool(found == set(range(len(some))))


def guard_on(kind: str, some: list[object], others: list[object]) -> object:
    """Return the guard of which :func:`sources_of_guard` returned that, or raise ``ValueError``."""
    if kind == "DuplicateInputs" and len(some) == len(others) == 1:
        return _duplicate_inputs.get()(some[0], others[0])
    if kind == "StorageOverlap":
        return _storage_overlap.get()(some, others)
    raise ValueError(f"no guard is a {kind} on {len(some)} and {len(others)} inputs")


# -- Dynamo

dynamo_config = Internal[Config]("torch._dynamo.config")
shapes_config = Internal[Config]("torch.fx.experimental._config")
#: Options of Dynamo and of symbolic shapes that what comes after Dynamo reads as well.
DYNAMO_OPTIONS = Fields(
    "torch._dynamo.config",
    """capture_scalar_outputs enable_compiler_collectives fake_tensor_disable_inference_mode
    leaf_function_check_escaped_gradients leaf_function_validate_outputs
    specialize_float specialize_int""",
)
SHAPES_OPTIONS = Fields(
    "torch.fx.experimental._config",
    """aggressive_guard_free_semantics backed_size_oblivious meta_nonzero_assume_all_nonzero
    no_data_dependent_graph_break skip_dtype_check_in_meta_registrations
    symbol_guard_limit_before_specialize unify_view_symbols_bso_meta use_duck_shape""",
    added={"aggressive_guard_free_semantics": (2, 12), "unify_view_symbols_bso_meta": (2, 13)},
)
aot_module = AnyFunction("torch._dynamo.backends.common:aot_module_simplified")
disable_dynamo = Internal[Function[Function[object]]]("torch._dynamo:disable")
count_calls = Internal[Function[int]]("torch._dynamo.utils:count_calls")
graph_break_reasons = Internal[list[Any]](
    "torch._dynamo.utils:graph_break_reasons", feature=WATCHING
)
#: Entered for as long as Dynamo, or a backward that was left for later, compiles.
while_compiling = Internal[Function[AbstractContextManager[None]]](
    "torch._dynamo.callback:CompilationCallbackHandler.install_callbacks", feature=WATCHING
)
optimized_module = AnyClass("torch._dynamo.eval_frame:OptimizedModule", feature=WATCHING)
Fields("torch._dynamo.output_graph:GraphCompileReason", "reason user_stack", feature=WATCHING)
(ORIGINAL_CALLABLE,) = Fields(
    "torch._dynamo.eval_frame:innermost_fn", "_torchdynamo_orig_callable", feature=WATCHING
)


def describe_break(reason: Any) -> dict[str, str]:
    """Return why Dynamo ended a graph, in one line, and where in the user's program."""
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return {"reason": reason.reason.strip().partition("\n")[0], "where": where}


# -- automatic dynamic shapes

_PGO = "torch._dynamo.pgo"

#: Where profiles are fetched from, and put to, if torch is to share them; or ``None``.
remote_profiles = AnyFunction(f"{_PGO}:get_remote_cache", feature=LOCKDOWN)
update_automatic_dynamic = AnyFunction(f"{_PGO}:update_automatic_dynamic", feature=PROFILES)
put_code_state = AnyFunction("torch._dynamo.convert_frame:put_code_state", feature=PROFILES)
automatic_dynamic_shapes = Flag("torch._dynamo.config:automatic_dynamic_shapes", feature=PROFILES)
cache_key_tag = Internal[str]("torch.compiler.config:cache_key_tag", feature=PROFILES)
_changes = AnyObject(f"{_PGO}:auto_dynamic", feature=PROFILES)
Fields(f"{_PGO}:FrameStateSizeEntry", ShapeState, feature=PROFILES)
Fields(
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase",
    "f_code distributed_state",
    feature=PROFILES,
)


def changing(state: ShapeState) -> tuple[tuple[bool, ...] | None, tuple[bool, ...] | None]:
    """Return which sizes and strides change; ``None`` where that is not known, as of a number."""
    changes = _changes.get()
    sizes, strides = (
        tuple(dim is changes for dim in dims) if isinstance(dims, tuple) else None
        for dims in (state.size, state.stride)
    )
    return sizes, strides


def with_changing(
    state: ShapeState, sizes: tuple[bool, ...] | None, strides: tuple[bool, ...] | None
) -> ShapeState:
    """Return a copy of what was seen, with what :func:`changing` said of another one.

    A number stays as it was seen: it has no tuple of sizes.
    """
    changes, made = _changes.get(), copy.copy(state)
    for name, flags in (("size", sizes), ("stride", strides)):
        dims: object = getattr(made, name)
        if isinstance(dims, tuple) and flags is not None and len(dims) == len(flags):
            marked = (changes if flag else dim for dim, flag in zip(dims, flags, strict=True))
            setattr(made, name, tuple(marked))
    return made


# -- ranks

_sync_lookups = Flag(
    "torch._functorch.config:_sync_cache_decision_cross_ranks",
    since=(2, 15),
)
_EXCHANGING = (
    Flag("torch._functorch.config:_sync_decision_cross_ranks"),
    Flag("torch._inductor.config:distributed_max_autotune_gemm"),
    # Both compare estimates, or with ``spmd_check`` graphs, across ranks.
    Flag("torch._inductor.config:aten_distributed_optimizations.enable_overlap_scheduling"),
    Flag("torch._inductor.config:reorder_for_compute_comm_overlap"),
    Flag("torch._dynamo.config:enable_compiler_collectives"),
)


def ranks_must_agree() -> bool:
    """Return whether ranks of this job exchange data while they compile: all have to, or none.

    Not where torch's own lookups see to it already.
    """
    if _sync_lookups.find() or not any(option.get() for option in _EXCHANGING):
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# -- first calls on fake tensors (DDPOptimizer)

_FAKIFIED = "torch._functorch._aot_autograd.runtime_wrappers:FakifiedOutWrapper"

answer_first_call = AnyFunction(f"{_FAKIFIED}.post_compile")
Fields(_FAKIFIED, "needs_post_compile out_metas")
Fields("torch._dynamo.backends.distributed:DDPOptimizerContext", "curr_bucket metadata_per_bucket")


def _context_of_fake_call() -> TracingContext | None:
    context = current_tracing_context.get()()
    return context if context is not None and context.fakify_first_call else None


def is_first_call_fake() -> bool:
    """Return whether the graph that is compiled now answers its first call with fake tensors."""
    return _context_of_fake_call() is not None


@contextlib.contextmanager
def first_calls_unasked() -> Iterator[None]:
    """Hide from torch, in the block, that first calls are to be on fake tensors."""
    context = _context_of_fake_call()
    if context is not None:
        context.fakify_first_call = False
    try:
        yield
    finally:
        if context is not None:
            context.fakify_first_call = True


def stand_in_for_metadata() -> None:
    """Have torch find metadata of a graph that is not compiled: DDPOptimizer insists on some."""
    context = _context_of_fake_call()
    if context is not None and context.fw_metadata is None:
        context.fw_metadata = cast("RuntimeMetadata", object())
