"""AOTAutograd: keys and entries of whole graphs, their metadata, and backwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from s3cache.torch_api import (
    AnyClass,
    AnyFunction,
    AnyObject,
    Fields,
    Flag,
    Internal,
    Predicate,
    installed_release,
)
from s3cache.torch_api.dynamo import WATCHING
from s3cache.torch_api.inductor import (
    CACHING_OPTIONS_OF_INDUCTOR,
    force_disable_caches,
    inductor_config,
)
from s3cache.torch_api.protocols import (
    AOTConfig,
    AOTResult,
    BackwardModule,
    Function,
    KeyDetails,
    KeyPickler,
    Operator,
    Reducer,
    RuntimeMetadata,
)

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule
    from torch.nn import Module

#: A feature that fails alone: what it needs of torch is declared with its name.
TORCH_KEY = "remembering torch's hash of its own source"

_AOT = "torch._functorch._aot_autograd"
_CACHE = f"{_AOT}.autograd_cache"
_CONFIG = "torch._functorch.config"
_DETAILS = f"{_CACHE}:AOTAutogradCacheDetails"
_PICKLER = f"{_CACHE}:AOTAutogradCachePickler"
_ENTRIES = f"{_CACHE}:AOTAutogradCache"
_RESULT = f"{_CACHE}:GenericAOTAutogradResult"
_SCHEMAS = f"{_AOT}.schemas"

# -- options

functorch_config = AnyObject(_CONFIG)
Fields(
    _CONFIG,
    """enable_autograd_cache enable_remote_autograd_cache bundled_autograd_cache joint_custom_pass
    activation_memory_budget_runtime_estimator activation_memory_budget_solver
    _save_config_ignore""",
)
#: Options that say how to cache, or how to go about compiling, and nothing about what is compiled.
CACHING_OPTIONS = (
    CACHING_OPTIONS_OF_INDUCTOR,
    Fields(
        _CONFIG,
        """debug_partitioner autograd_cache_allow_custom_autograd_functions bundled_autograd_cache
        enable_autograd_cache enable_remote_autograd_cache force_autograd_cache
        strict_autograd_cache""",
    ),
)


class Asked(NamedTuple):
    """Which tiers torch's options allow a level of the cache to use."""

    local: bool
    remote: bool


def tiers_asked(level: str) -> Asked:
    """Return the tiers that torch's options allow for ``level``, ``aot`` or ``fx``.

    An option for the remote cache that is not set follows the one for the local cache.
    """
    functorch, inductor = functorch_config.get(), inductor_config.get()
    local, remote = (
        (functorch.enable_autograd_cache, functorch.enable_remote_autograd_cache)
        if level == "aot"
        else (inductor.fx_graph_cache, inductor.fx_graph_remote_cache)
    )
    if force_disable_caches.get():
        local = remote = False
    return Asked(local, local if remote is None else remote)


def has_flexible_layout(operator: Operator) -> bool:
    """Return True if Inductor may lay out inputs of a custom operator otherwise than traced."""
    names = {str(tag).rpartition(".")[2] for tag in operator.tags}
    if any(name.startswith("needs_") for name in names):
        return False
    default = getattr(functorch_config.get(), "custom_op_default_layout_constraint", "")
    return "flexible_layout" in {*names, default}


# -- keys

autograd_cache_key = Internal[Function[tuple[str, list[str]]]](f"{_CACHE}:autograd_cache_key")
check_cacheable = Internal[Function[None]](f"{_CACHE}:check_cacheable")
check_node_safe = Internal[Function[None]](f"{_CACHE}:check_node_safe")
key_details = Internal[type[KeyDetails]](_DETAILS)
get_hash = Internal[Callable[[KeyPickler, object], str]](f"{_PICKLER}.get_hash")
bypass_error = Internal[type[Exception]](f"{_CACHE}:BypassAOTAutogradCache")
_key_prefix = Internal[str](f"{_CACHE}:AOTAUTOGRAD_CACHE_PREFIX", since=(2, 13))
_line_for_global = Internal[Callable[[str, object], str]](
    f"{_PICKLER}._format_global_for_cache_key", since=(2, 13)
)
_sanitized = AnyFunction(f"{_CACHE}:sanitize_gm_for_cache")
torch_key = AnyFunction("torch._inductor.codecache:torch_key", feature=TORCH_KEY)
_set_torch_key = AnyFunction("torch._inductor.codecache:torch_key.set", feature=TORCH_KEY)
_enrich_profiler_metadata = Flag("torch.fx.experimental._config:enrich_profiler_metadata")
_codegen = AnyClass("torch.fx.graph:CodeGen")
#: What torch's key has of the context functions of checkpointed regions; it refuses some.
context_hashes = Internal[Function[list[object]]](f"{_CACHE}:_collect_context_fn_hashes")
Fields(_DETAILS, KeyDetails)
Fields(_PICKLER, KeyPickler, added={"reducer_override": (2, 12)})
Fields(f"{_SCHEMAS}:AOTConfig", AOTConfig)
Fields("torch.fx:Graph", "_codegen")
Fields("torch.fx.graph:CodeGen", "_body_transformer")

#: Attributes of :class:`KeyDetails` that are options of config modules.
CONFIG_DETAILS = Fields(
    _DETAILS,
    "autograd_config inductor_config inductor_config_comms",
    added={"inductor_config_comms": (2, 13)},
)
#: One that says how much to record, beside code, of where it comes from.
PROVENANCE_DETAILS = Fields(
    _DETAILS, "provenance_tracking_level", added={"provenance_tracking_level": (2, 12)}
)
#: One that has something for each device that has been registered so far.
(PASSES_OF_BACKENDS,) = Fields(_DETAILS, "custom_backend_passes")
#: One that says how to cache, and nothing about what is compiled.
CACHING_DETAILS = Fields(_DETAILS, "precompile_enabled")
# Until 2.12 torch's key does not ask whether a graph has anything for the processor to do.
_ASKS_FOR_CPU_CODE = "_may_generate_cpu_cpp_code"
Fields(_DETAILS, _ASKS_FOR_CPU_CODE, since=(2, 13))
#: Attributes of a graph module that are made from its graph.
GENERATED = Fields("torch.fx.graph_module:GraphModule", "_graph _code _lineno_map _prologue_start")
#: What the metadata of a node says of what it returns: after Dynamo, after AOTAutograd.
NODE_VALUES = ("example_value", "val")
#: Where a graph module keeps the context function of a checkpointed region.
(CHECKPOINT_CONTEXT,) = Fields(f"{_CACHE}:_collect_context_fn_hashes", "_checkpoint_context_fn")
#: What a node's metadata says of a function of ``fx.wrap``: generated code calls it by its name.
WRAPPED, WRAPPED_HASH = Fields(f"{_CACHE}:check_node_safe", "is_wrapped user_cache_hash")


def key_prefix() -> str:
    """Return what torch writes before the digest in the name of a key."""
    return _key_prefix.find() or "a"


def tells_threads(details: KeyDetails) -> bool:
    """Return whether torch's key has the number of threads, where code for the processor needs it.

    Not before torch 2.13.
    """
    return hasattr(details, _ASKS_FOR_CPU_CODE)


def may_have_cpu_code(details: KeyDetails) -> bool:
    """Return whether torch says that it may make code for the processor; not before torch 2.13."""
    ask = getattr(details, _ASKS_FOR_CPU_CODE, None)
    return ask is not None and bool(ask(details.gm, details.example_inputs))


def set_torch_key(value: bytes) -> None:
    """Have torch take ``value`` for the hash of its own source, unless it has computed it."""
    with contextlib.suppress(AssertionError, RuntimeError):  # the first until 2.12
        _set_torch_key.get()(value)


def graph_module_of(mod: Module) -> GraphModule:
    """Return the graph of what torch looks up, which may be wrapped."""
    return cast("GraphModule", getattr(mod, "gm", mod))


def name_of_key(
    mod: Module, args: Sequence[object], aot_config: AOTConfig, others: Sequence[object]
) -> str:
    """Return what ``try_load`` with these arguments would look up, or raise what it would raise."""
    ask, release = autograd_cache_key.get(), installed_release()
    if release >= (2, 14):  # compiler configuration; paths of offloaded activations
        return ask(mod, args, aot_config, others[0], *others[3:4])[0]
    if release >= (2, 12):
        return ask(mod, args, aot_config, others[0])[0]
    gm = graph_module_of(mod)
    options = {"cudagraphs": others[0], "boxed_forward_device_index": others[1]}
    with _sanitized.get()(gm):
        return ask(gm, args, aot_config, options)[0]


def inherited_reducer(pickler: KeyPickler) -> Reducer:
    """Return what the pickler itself asks about each object."""
    return getattr(pickler, "reducer_override", _refuse_nested)


def _refuse_nested(value: object) -> object:
    """Refuse what later releases refuse: a table of reducers takes it for any other tensor."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError("a nested tensor has sizes that are numbered as they come")
    return NotImplemented


def line_for_global() -> Callable[[str, object], str] | None:
    """Return how torch's key words a global of generated code, if that can be asked."""
    return None if _enrich_profiler_metadata.get() else _line_for_global.find()


def has_plain_codegen(graph: Graph) -> bool:
    """Return whether the code of a graph is generated from its nodes and from nothing else."""
    codegen = graph._codegen
    return type(codegen) is _codegen.get() and codegen._body_transformer is None


@functools.cache
def plain_arguments() -> tuple[frozenset[type], frozenset[type]]:
    """Return types of arguments that generated code has as their ``repr``; and of their holders."""
    import torch
    from torch.fx import Node, immutable_collections

    constants = (type(None), bool, int, float, complex, str, type(...))
    of_torch = (torch.dtype, torch.device, torch.layout, torch.memory_format, Node)
    lists = (tuple, list, immutable_collections.immutable_list)
    dicts = (dict, immutable_collections.immutable_dict)
    return frozenset((*constants, *of_torch)), frozenset((*lists, *dicts))


def without_backend_id(aot_config: AOTConfig) -> AOTConfig:
    """Return the same, less an id that is random in each process (``caching_precompile``)."""
    if aot_config.precompile_backend_id is None:
        return aot_config
    return dataclasses.replace(aot_config, precompile_backend_id=None)  # type: ignore[type-var]


# -- entries

try_load = AnyFunction(f"{_ENTRIES}.try_load")
iterate_over_candidates = AnyFunction(f"{_ENTRIES}.iterate_over_candidates")
evaluate_guards = Predicate(f"{_ENTRIES}.evaluate_guards")
save = AnyFunction(f"{_ENTRIES}.save")
write_to_local_cache = AnyFunction(f"{_ENTRIES}._write_to_local_cache")
pickle_entry = Internal[Function[bytes | None]](f"{_ENTRIES}._pickle_entry")
find_unpicklable_field = AnyFunction(f"{_ENTRIES}._find_unpicklable_field")
#: torch's own remote cache, for those that have one.
remote_cache = AnyFunction(f"{_ENTRIES}.get_remote_cache")
aot_result = Internal[type[AOTResult]](_RESULT)
wrap_post_compile = AnyFunction(f"{_RESULT}.wrap_post_compile")
miss_error = Internal[type[Exception]](f"{_CACHE}:FXGraphCacheMiss")
should_use_local_cache = Predicate(
    "torch._functorch.aot_autograd:should_use_local_autograd_cache", feature=WATCHING
)
#: What torch says of its option, and what is asked where graphs are looked up.
uses_remote_cache = Predicate(f"{_CACHE}:should_use_remote_autograd_cache")
should_use_remote_cache = Predicate(
    "torch._functorch.aot_autograd:should_use_remote_autograd_cache"
)
#: Two modules ask, each by a name of its own.
should_bundle = Predicate(f"{_CACHE}:should_bundle_autograd_cache")
should_bundle_compiled = Predicate(f"{_AOT}.graph_compile:should_bundle_autograd_cache")
Fields(_RESULT, AOTResult)
Fields(f"{_AOT}.aot_autograd_result:BundledCompiledForward", "result post_compile")

plain_tensor_meta = AnyClass(f"{_SCHEMAS}:PlainTensorMeta")
Fields(f"{_SCHEMAS}:ViewAndMutationMeta", RuntimeMetadata)
#: Fields of an entry that have their own place in a frame, or are the code itself.
ENTRY_BULK = Fields(
    _RESULT,
    """compiled_fw compiled_bw aot_joint_graph_str aot_forward_graph_str aot_backward_graph_str
    runtime_metadata dispatch_wrappers forward_time_taken_ns backward_time_taken_ns guards_expr
    serialized_bw_module min_cut_info_str""",
    added={"min_cut_info_str": (2, 13)},
)
#: A description has the attributes of every object of these modules.
DESCRIBED = f"{_AOT}."
#: Properties that a description has like attributes.
COMPUTED = Fields(f"{_SCHEMAS}:InputAliasInfo", "mutation_type").names


def loaded(function: Function[object], aot_config: AOTConfig) -> object:
    """Return what ``try_load`` returns for a hit: with the configuration since torch 2.13."""
    return (function, aot_config) if installed_release() >= (2, 13) else function


def is_hit(result: object) -> bool:
    """Return whether what ``try_load`` returned is a hit."""
    return (result[0] if isinstance(result, tuple) else result) is not None


# -- backwards

_BACKWARD = f"{_AOT}.aot_autograd_result:SerializedGraphModule"

deserialize_backward = AnyFunction(f"{_BACKWARD}.deserialize")
keeps_graph = Predicate("torch._C._autograd:_get_current_graph_task_keep_graph")
Fields(_BACKWARD, BackwardModule)


def interpreted(module: GraphModule) -> Callable[[list[object]], object]:
    """Return a graph that was traced as a function that runs it operator by operator."""
    import torch

    def run(args: list[object]) -> object:
        values = list(args)
        args.clear()
        with torch.no_grad():
            return module(*values)

    return boxed(run)


def boxed(function: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Mark ``function`` as one that takes its arguments as a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


# -- functions that compiled autograd makes as it goes

#: The module of all of them.
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_MAKES_PROLOGUE = "AutogradCompilerInstance.proxy_call_aot_backward"
_WRITES_PROLOGUE = f"{_AOT}.runtime_wrappers:_codegen_backward_prologue"

autograd_node = AnyClass(f"{COMPILED_AUTOGRAD}:Op")
(_PROLOGUE,) = Fields(f"{COMPILED_AUTOGRAD}:{_MAKES_PROLOGUE}", "call_aot_bwd_prologue")
(PROLOGUE_CELL,) = Fields(
    f"{COMPILED_AUTOGRAD}:{_MAKES_PROLOGUE}",
    "bw_prologue_fn",
    since=(2, 13),
)
#: The prologue that compiled autograd makes for the backward pass of a compiled graph.
PROLOGUE = f"{_MAKES_PROLOGUE}.<locals>.{_PROLOGUE}"
#: Globals of the code that AOTAutograd generates for a prologue: what it calls, ...
PROLOGUE_CALLS, PROLOGUE_TANGENTS = Fields(
    _WRITES_PROLOGUE, "_process_tangent_ _tangent_metas_", since=(2, 13)
)
#: ... and what its error messages say.
PROLOGUE_MESSAGES = Fields(
    _WRITES_PROLOGUE, "_tangent_descs_ _compile_id_ _stack_traces_", since=(2, 13)
)
Fields(f"{COMPILED_AUTOGRAD}:Op", "__name__ is_custom_function")

# -- settings of the process

view_replay_enabled = Predicate("torch._C:_is_view_replay_enabled")
autocast_devices = AnyFunction("torch._C:_autocast_supported_devices")
attention_priority = Internal[Callable[[], list[int]]]("torch._C:_get_sdp_priority_order")
