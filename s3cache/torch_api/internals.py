"""Every internal of torch that s3cache uses: the one file that a new release of torch touches.

By subject: names, with the releases that have them, and beside them what it takes to use them where
releases differ or a name does not say it all. A declaration without releases holds for all from
:data:`OLDEST` to :data:`NEWEST`. ``python -m s3cache.torch_api`` checks every declaration against
the torch that is installed.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import functools
import itertools
import operator as operator_module
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from logging import Logger
from operator import attrgetter, is_
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, NamedTuple, cast

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache.torch_api._declare import (
    Behaviour,
    Fields,
    Internal,
    Release,
    Shape,
    Words,
    installed_release,
    installed_version,
)
from s3cache.torch_api._unpickled import NAMES
from s3cache.torch_api.protocols import (
    AOTConfig,
    AOTResult,
    AutogradNode,
    AutotuneCache,
    BackwardModule,
    CachingAutotuner,
    CompiledGraph,
    CompiledHalf,
    CompileReason,
    Config,
    CppLibraries,
    CustomOperator,
    CustomPass,
    DecompositionTable,
    DeviceMesh,
    EventLog,
    ExpressionPrinter,
    FakeImplementation,
    FakeKernel,
    FakeMode,
    FakeRegistration,
    FirstCallWrapper,
    Function,
    FunctorchConfig,
    GuardsContext,
    InductorConfig,
    KeyDetails,
    KeyPickler,
    MemoizedTable,
    Operator,
    OperatorLibrary,
    OperatorPacket,
    OutputInfo,
    PatternEntry,
    PatternPass,
    PythonModules,
    Reducer,
    RuntimeMetadata,
    ShapeEnv,
    ShapeGuard,
    ShapeState,
    SharedStore,
    SplitByDDP,
    StaticKernel,
    SubclassMeta,
    TracingContext,
    Translator,
    ViewSequence,
    Virtualized,
)

if TYPE_CHECKING:
    from torch import SymInt, Tensor
    from torch.fx import Graph, GraphModule, Node
    from torch.nn import Module

OLDEST: Release = (2, 11)
NEWEST: Release = (2, 15)

#: The module whose import means that something will be compiled; it imports the others here.
COMPILER = "torch._inductor.compile_fx"
#: The one whose import means that torch's own caches are about to be used: it comes with the
#: compiler, or earlier where a program loads artifacts into them.
CODE_CACHES = "torch._inductor.codecache"
TORCH = "torch"

logger = logger_of()

# Features that fail alone: what they need of torch is declared with their names.

#: Remove local entries when torch clears its caches.
CLEARING = "removing local entries when torch clears its caches"
#: Evaluate guards on sizes as a compile would, without the branches of Python's ``min``.
GUARD_EXPRESSIONS = "evaluating guards on sizes without adding guards"
KEY_LOGS = "showing key components in torch's logs"
PROFILES = "sharing which sizes change (shape_profile)"
WATCHING = "watching a program for s3cache check and warm"
TORCH_KEY = "remembering torch's hash of its own source"
TRACES = "showing lookups in torch's traces"
#: These have a fallback of their own where they are used.
BACKEND = 'backend="s3cache"'
COMPILER_NAME = "naming the C++ compiler in entries"
LOCKDOWN = "private directories for torch's own caches"
RANKS = "hits where ranks must agree"

_warned = False


def is_supported() -> bool:
    """Return whether the installed torch is new enough; if not, one warning says so."""
    global _warned
    if installed_release() >= OLDEST:
        return True
    if not _warned:
        logger.warning(
            "torch %s is not supported (%d.%d and later are); it compiles without a cache %s",
            installed_version(),
            *OLDEST,
            pointer("UnsupportedTorchError"),
        )
        _warned = True
    return False


def is_untested() -> bool:
    """Return whether the installed torch is newer than any release that was tried."""
    return installed_release() > NEWEST


@functools.cache
def torch_directory() -> str:
    """Where torch is installed, with a separator at the end. Imports torch."""
    import torch

    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def is_of_torch(function: FunctionType) -> bool:
    """Whether the code is torch's: ``functools.wraps`` gives users' functions names of torch's."""
    homes = (function.__globals__.get("__name__"), function.__module__)
    return all(str(home).partition(".")[0] == "torch" for home in homes)


def has_code_of_torch(function: FunctionType) -> bool:
    """Whether the code lies in a file of torch's, whatever names the function bears."""
    return function.__code__.co_filename.startswith(torch_directory())


_keeping_from_dynamo: Internal[Function[object]] = Internal("torch._compile:_disable_dynamo")


def is_kept_from_dynamo(function: object, inner: object) -> bool:
    """Whether ``function`` does what ``inner`` does, and Dynamo does not look into it.

    torch makes such a one of ``torch.manual_seed`` when Dynamo is imported.
    """
    if not isinstance(function, FunctionType):
        return False
    codes = _keeping_from_dynamo.get().__code__.co_consts
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__ in codes and any(each is inner for each in cells)


def name_of(function: object) -> str:
    """The name by which torch's check knows a function; an operator for what it was made of."""
    function = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '<none>')}"


# -- keys of whole graphs

_AOT = "torch._functorch._aot_autograd"
_CACHE = f"{_AOT}.autograd_cache"
_DETAILS = f"{_CACHE}:AOTAutogradCacheDetails"
_PICKLER = f"{_CACHE}:AOTAutogradCachePickler"
_CODE = "torch._inductor.codecache"

autograd_cache_key: Internal[Function[tuple[str, list[str]]]] = Internal(
    f"{_CACHE}:autograd_cache_key"
)
check_cacheable: Internal[Callable[[GraphModule], None]] = Internal(f"{_CACHE}:check_cacheable")
check_node_safe: Internal[Callable[[Node], None]] = Internal(f"{_CACHE}:check_node_safe")
key_details: Internal[type[KeyDetails]] = Internal(_DETAILS)
get_hash: Internal[Callable[[KeyPickler, object], str]] = Internal(f"{_PICKLER}.get_hash")
bypass_error: Internal[type[Exception]] = Internal(f"{_CACHE}:BypassAOTAutogradCache")
_key_prefix: Internal[str] = Internal(
    f"{_CACHE}:AOTAUTOGRAD_CACHE_PREFIX", since=(2, 13), instead="the letter itself"
)
_line_for_global: Internal[Callable[[str, object], str]] = Internal(
    f"{_PICKLER}._format_global_for_cache_key",
    since=(2, 13),
    instead="a reducer of graphs that cannot be asked about a single global",
)
_sanitized: Internal[Callable[[GraphModule], AbstractContextManager[None]]] = Internal(
    f"{_CACHE}:sanitize_gm_for_cache"
)
#: What a key's pickler puts in place of an object: it returns its argument.
same: Internal[Callable[[object], object]] = Internal(f"{_CODE}:_ident")
tensor_metadata: Internal[Callable[[Tensor], object]] = Internal(
    f"{_CODE}:extract_tensor_metadata_for_cache_key"
)
torch_key: Internal[Callable[[], bytes]] = Internal(f"{_CODE}:torch_key", feature=TORCH_KEY)
_set_torch_key: Internal[Callable[[bytes], None]] = Internal(
    f"{_CODE}:torch_key.set", feature=TORCH_KEY
)
Shape(_DETAILS, KeyDetails)
Shape(_PICKLER, KeyPickler, added={"reducer_override": (2, 12)})
Shape(f"{_AOT}.schemas:AOTConfig", AOTConfig)

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
(PASSES_OF_BACKENDS,) = Fields(_DETAILS, "custom_backend_passes").names
#: One that says how to cache, and nothing about what is compiled.
CACHING_DETAILS = Fields(_DETAILS, "precompile_enabled")
#: What torch's key has of the context functions of checkpointed regions; it refuses some.
context_hashes: Internal[Callable[[GraphModule], list[object]]] = Internal(
    f"{_CACHE}:_collect_context_fn_hashes"
)
#: What the metadata of a node says of what it returns: after Dynamo, after AOTAutograd.
NODE_VALUES = ("example_value", "val")
#: Until 2.12 torch's key does not ask whether a graph has anything for the processor to do.
_ASKS_FOR_CPU_CODE = Fields(
    _DETAILS, "_may_generate_cpu_cpp_code", added={"_may_generate_cpu_cpp_code": (2, 13)}
)
#: Where a graph module keeps the context function of a checkpointed region.
(CHECKPOINT_CONTEXT,) = Words(f"{_CACHE}:_collect_context_fn_hashes", "_checkpoint_context_fn")
#: What a node's metadata says of a function of ``fx.wrap``.
WRAPPED, WRAPPED_HASH = Words(f"{_CACHE}:check_node_safe", "is_wrapped user_cache_hash")


#: What empties torch's directory of entries; its remote caches stay as they are.
clear_autograd_cache: Internal[Callable[[], None]] = Internal(
    f"{_CACHE}:AOTAutogradCache.clear", feature=CLEARING
)
clear_fx_cache: Internal[Callable[[], None]] = Internal(
    f"{_CODE}:FxGraphCache.clear", feature=CLEARING
)


def key_prefix() -> str:
    """What torch writes before the digest in the name of a key."""
    return _key_prefix.find() or "a"


def tells_threads(details: KeyDetails) -> bool:
    """Whether torch's key has the number of threads, where code for the processor is made for it.

    The others leave it out also where code for a graphics card does not depend on it.
    """
    return all(hasattr(details, name) for name in _ASKS_FOR_CPU_CODE.names)


def may_have_cpu_code(details: KeyDetails) -> bool:
    """Whether torch says that it may make code for the processor; not before torch 2.13."""
    (name,) = _ASKS_FOR_CPU_CODE.names
    ask = getattr(details, name, None)
    return ask is not None and bool(ask(details.gm, details.example_inputs))


def set_torch_key(value: bytes) -> None:
    """Have torch take ``value`` for the hash of its own source, unless it has computed it."""
    with contextlib.suppress(AssertionError, RuntimeError):  # the first until 2.12
        _set_torch_key.get()(value)


def graph_module_of(mod: Module) -> GraphModule:
    """The graph of what torch looks up, which may be wrapped."""
    return cast("GraphModule", getattr(mod, "gm", mod))


def name_of_key(
    mod: Module, args: Sequence[object], aot_config: AOTConfig, others: Sequence[object]
) -> str:
    """What ``try_load`` with these arguments would look up; raises what it would raise."""
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
    """What the pickler itself asks about each object.

    Those that have only a table of reducers take a nested tensor for any other.
    """
    own: Reducer | None = getattr(pickler, "reducer_override", None)
    return _refuse_nested if own is None else own


def _refuse_nested(value: object) -> object:
    """Overrides nothing, and refuses what later releases refuse."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError("a nested tensor has sizes that are numbered as they come")
    return NotImplemented


def line_for_global() -> Callable[[str, object], str] | None:
    """How torch's key words a global of generated code; ``None`` where that cannot be asked."""
    return None if _enrich_profiler_metadata.get() else _line_for_global.find()


_codegen: Internal[type] = Internal("torch.fx.graph:CodeGen")
_qualified_name: Internal[Callable[[object], str]] = Internal("torch.fx.node:_get_qualified_name")
_is_from_torch: Internal[Callable[[object], bool]] = Internal("torch.fx.graph:_is_from_torch")
Fields("torch.fx:Graph", "_codegen")
Fields("torch.fx.graph:CodeGen", "_body_transformer")
#: Of a node: its code is generated with a call that marks what it calls.
WRAPPED = "is_wrapped"


def has_plain_codegen(graph: Graph) -> bool:
    """Whether the code of a graph is generated from its nodes and from nothing else."""
    codegen = graph._codegen
    return type(codegen) is _codegen.get() and codegen._body_transformer is None


def name_in_code(function: object) -> str | None:
    """How generated code writes a function or class of torch's or Python's: the same for no other.

    ``None`` for those of others.
    """
    import torch

    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return None
    for module in (builtins, operator_module):
        if getattr(module, name, None) is function:
            return f"{module.__name__}.{name}"
    is_method = isinstance(function, (MethodDescriptorType, WrapperDescriptorType))
    if is_method and getattr(torch.Tensor, name, None) is function:
        return f"torch.Tensor.{name}"
    return _qualified_name.get()(function) if _is_from_torch.get()(function) else None


@functools.cache
def plain_arguments() -> tuple[frozenset[type], frozenset[type]]:
    """Types of arguments that generated code has as their ``repr``; and those that hold such."""
    import torch
    from torch.fx import Node, immutable_collections

    constants = (type(None), bool, int, float, complex, str, type(...))
    of_torch = (torch.dtype, torch.device, torch.layout, torch.memory_format, Node)
    lists = (tuple, list, immutable_collections.immutable_list)
    dicts = (dict, immutable_collections.immutable_dict)
    return frozenset((*constants, *of_torch)), frozenset((*lists, *dicts))


def without_debugging(level: int) -> int:
    """How much to record of where code comes from, less what ``TORCH_COMPILE_DEBUG`` adds."""
    return 0 if level == 1 and _debugging.get() else level


def without_backend_id(aot_config: AOTConfig) -> AOTConfig:
    """The same, less an id that is random in each process (``caching_precompile``)."""
    if aot_config.precompile_backend_id is None:
        return aot_config
    return dataclasses.replace(aot_config, precompile_backend_id=None)  # type: ignore[type-var]


# -- entries of whole graphs

_ENTRIES = f"{_CACHE}:AOTAutogradCache"

try_load: Internal[Function[object]] = Internal(f"{_ENTRIES}.try_load")
iterate_over_candidates: Internal[Function[Iterator[tuple[object, bytes, bool]]]] = Internal(
    f"{_ENTRIES}.iterate_over_candidates"
)
evaluate_guards: Internal[Function[bool]] = Internal(f"{_ENTRIES}.evaluate_guards")
evaluate_guards_expression: Internal[Function[bool]] = Internal(
    "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression",
    feature=GUARD_EXPRESSIONS,
)
save: Internal[Function[None]] = Internal(f"{_ENTRIES}.save")
write_to_local_cache: Internal[Callable[[str, bytes], None]] = Internal(
    f"{_ENTRIES}._write_to_local_cache"
)
pickle_entry: Internal[Function[bytes | None]] = Internal(f"{_ENTRIES}._pickle_entry")
find_unpicklable_field: Internal[Callable[[AOTResult], str | None]] = Internal(
    f"{_ENTRIES}._find_unpicklable_field"
)
aot_result: Internal[type[AOTResult]] = Internal(f"{_CACHE}:GenericAOTAutogradResult")
wrap_post_compile: Internal[Function[object]] = Internal(
    f"{_CACHE}:GenericAOTAutogradResult.wrap_post_compile"
)
miss_error: Internal[type[Exception]] = Internal(f"{_CACHE}:FXGraphCacheMiss")
should_use_local_cache: Internal[Callable[[], bool]] = Internal(
    "torch._functorch.aot_autograd:should_use_local_autograd_cache", feature=WATCHING
)
#: What torch says of its option, and what is asked where graphs are looked up.
uses_remote_cache: Internal[Callable[[], bool]] = Internal(
    f"{_CACHE}:should_use_remote_autograd_cache"
)
should_use_remote_cache: Internal[Callable[[], bool]] = Internal(
    "torch._functorch.aot_autograd:should_use_remote_autograd_cache"
)
#: torch's own remote cache, for those that have one.
remote_cache: Internal[Callable[[], object]] = Internal(f"{_ENTRIES}.get_remote_cache")
#: Two modules ask, each by a name of its own.
should_bundle: Internal[Callable[[], bool]] = Internal(f"{_CACHE}:should_bundle_autograd_cache")
should_bundle_compiled: Internal[Callable[[], bool]] = Internal(
    f"{_AOT}.graph_compile:should_bundle_autograd_cache"
)
Shape(f"{_CACHE}:GenericAOTAutogradResult", AOTResult)
Shape(f"{_AOT}.aot_autograd_result:BundledCompiledForward", CompiledHalf)


#: What pickled entries may name and call, by full name.
UNPICKLED = NAMES
#: What a pickled tensor names for its content: it unpickles that by any class.
UNPICKLED_STORAGE = "torch.storage._load_from_bytes"
#: What a pickled tensor of a subclass names: it calls any function.
UNPICKLED_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
rebuild_subclass: Internal[Function[object]] = Internal("torch._tensor:_rebuild_from_type_v2")
_PLAIN = frozenset({"dtype", "layout", "memory_format", "qscheme"})
_VIEWS = "torch._C._functionalization"


_COMPUTING = frozenset(
    {
        "torch._C._fft",
        "torch._C._linalg",
        "torch._C._nn",
        "torch._C._special",
        "torch.nn.functional",
    }
)
_OPERATORS = "torch._C._VariableFunctionsClass"
# Has data classes of where values come from, as guards name it: each release has more of them.
_SOURCES = "torch._dynamo.source"


def is_listed(module: str, name: str) -> bool:
    """Whether a pickled entry may name and call what ``module`` has by that name."""
    return f"{module}.{name}" in UNPICKLED or (
        module == _SOURCES and name.isidentifier() and name.endswith("Source")
    )


def computes(module: str, name: str) -> bool:
    """Whether this is a function over tensors, such as an activation that a subclass keeps.

    Args:
        module: where it is, or the class, as ``module.name``, whose attribute it is.
    """
    return module in _COMPUTING or (module == _OPERATORS and name != "from_file")


def is_plain(found: object) -> bool:
    """Whether this is a type or format of data, or a class of tensors, or of views of one."""
    import torch

    if isinstance(found, type):
        return issubclass(found, torch.Tensor) or found.__module__ == _VIEWS
    return type(found).__module__ == "torch" and type(found).__name__ in _PLAIN


def is_expression(cls: type) -> bool:
    """Whether objects of this class are expressions over sizes, or parts of some."""
    import sympy  # type: ignore[import-untyped]

    return issubclass(cls, sympy.Basic)


def loaded(function: Function[object], aot_config: AOTConfig) -> object:
    """What ``try_load`` returns for a hit: with the configuration since torch 2.13."""
    return (function, aot_config) if installed_release() >= (2, 13) else function


def is_hit(result: object) -> bool:
    """Whether what ``try_load`` returned is a hit."""
    return (result[0] if isinstance(result, tuple) else result) is not None


# -- keys and entries of halves of graphs (Inductor's cache of FX graphs)

_FX = f"{_CODE}:FxGraphCache"
_FX_PICKLER = f"{_CODE}:FxGraphCachePickler"

fx_prepare_key: Internal[Function[tuple[object, object]]] = Internal(f"{_FX}.prepare_key")
fx_check_cacheable: Internal[Function[None]] = Internal(f"{_FX}._check_can_cache")
fx_lookup: Internal[Function[tuple[CompiledGraph | None, dict[str, object]]]] = Internal(
    f"{_FX}._lookup_graph"
)
fx_candidates: Internal[Function[Iterator[tuple[object, bytes, bool]]]] = Internal(
    f"{_FX}.iterate_over_candidates"
)
fx_save: Internal[Function[None]] = Internal(f"{_FX}._save_graph")
fx_write_to_local_cache: Internal[Callable[[str, bytes], None]] = Internal(
    f"{_FX}._write_to_local_cache"
)
fx_remote_cache: Internal[Callable[[], object]] = Internal(f"{_FX}.get_remote_cache")
should_use_remote_fx_here: Internal[Callable[[], bool]] = Internal(
    "torch._inductor.compile_fx:should_use_remote_fx_graph_cache"
)
fx_key_details: Internal[type[KeyDetails]] = Internal(f"{_CODE}:FxGraphHashDetails")
details_of: Internal[Function[KeyDetails]] = Internal(f"{_CODE}:FxGraphHashDetails")
_fx_get_key: Internal[Callable[[KeyPickler, object], str]] = Internal(
    f"{_FX_PICKLER}.get_key", since=(2, 13), instead="its hash, with a letter before"
)
_fx_get_hash: Internal[Callable[[KeyPickler, object], str]] = Internal(f"{_FX_PICKLER}.get_hash")
fx_debug_lines: Internal[Callable[[KeyPickler, object], list[str]]] = Internal(
    f"{_FX_PICKLER}.debug_lines", feature=KEY_LOGS
)
fx_pickler: Internal[Callable[[GraphModule], KeyPickler]] = Internal(_FX_PICKLER)
Shape(_FX_PICKLER, KeyPickler, added={"reducer_override": (2, 13)})
#: Details of an FX graph that are no settings.
GRAPHS_DETAILS = Fields(f"{_CODE}:FxGraphHashDetails", "gm example_inputs fx_kwargs")
is_frozen_param: Internal[Callable[[Tensor], bool]] = Internal(
    "torch._inductor.freezing_utils:is_frozen_param"
)
can_inline_constant: Internal[Callable[[Tensor], bool]] = Internal(
    "torch._inductor.graph:GraphLowering.can_inline_constant"
)

#: What torch writes before the digest in the key of an FX graph.
FX_PREFIX = "f"


def fx_key() -> Internal[Callable[[KeyPickler, object], str]]:
    """What makes the key of an FX graph of its details."""
    return _fx_get_hash if _fx_get_key.find() is None else _fx_get_key


def fx_prefix() -> str:
    """What :func:`fx_key` writes before the digest."""
    return "" if _fx_get_key.find() is None else FX_PREFIX


def without_carried(arguments: Sequence[object]) -> Sequence[object]:
    """What :data:`fx_check_cacheable` is given beside the graph, less hooks among the inputs.

    A forward carries those over to its backward; its own code does not touch them. Until 2.12 the
    check is given the graph alone.
    """
    if not arguments:
        return arguments
    inputs, *others = arguments
    carried = backward_state.get()
    kept = [value for value in cast("Sequence[object]", inputs) if not isinstance(value, carried)]
    return [kept, *others]


def asks_fx_cache() -> bool:
    """Whether Inductor asks its cache of FX graphs at all, as far as options tell."""
    return inductor_config.get().fx_graph_cache or should_use_remote_fx_cache.get()()


class Asked(NamedTuple):
    """Which tiers torch's options allow a level of the cache to use."""

    local: bool
    remote: bool


def tiers_asked(level: str) -> Asked:
    """Return the tiers that torch's options allow for ``level``, ``aot`` or ``fx``.

    An option for the remote cache that is not set follows the one for the local cache: who has
    enabled s3cache wants both.
    """
    if force_disable_caches.get():
        return Asked(local=False, remote=False)
    if level == "aot":
        functorch = functorch_config.get()
        local, remote = functorch.enable_autograd_cache, functorch.enable_remote_autograd_cache
    else:
        inductor = inductor_config.get()
        local, remote = inductor.fx_graph_cache, inductor.fx_graph_remote_cache
    return Asked(local=local, remote=local if remote is None else remote)


# -- what a compiled graph does to its inputs and outputs

_SCHEMAS = f"{_AOT}.schemas"

plain_tensor_meta: Internal[type] = Internal(f"{_SCHEMAS}:PlainTensorMeta")
subclass_meta: Internal[type[SubclassMeta]] = Internal(f"{_SCHEMAS}:SubclassCreationMeta")
Shape(f"{_SCHEMAS}:SubclassCreationMeta", SubclassMeta)
Shape(f"{_SCHEMAS}:ViewAndMutationMeta", RuntimeMetadata)
Shape(f"{_SCHEMAS}:OutputAliasInfo", OutputInfo)
Shape(f"{_AOT}.functional_utils:ViewMetaSequence", ViewSequence)
Fields(f"{_SCHEMAS}:PlainTensorMeta", "unwrapped_idx")

#: What of an entry its description is made of, beside the runtime metadata, ...
ENTRY_DESCRIPTION = Fields(
    f"{_CACHE}:GenericAOTAutogradResult",
    """maybe_subclass_meta num_fw_outs_saved_for_bw indices_of_inps_to_detach
    sanitized_aot_config""",
)
#: ... and what has its own place in a frame, or is the code itself.
ENTRY_BULK = Fields(
    f"{_CACHE}:GenericAOTAutogradResult",
    """compiled_fw compiled_bw aot_joint_graph_str aot_forward_graph_str aot_backward_graph_str
    runtime_metadata dispatch_wrappers forward_time_taken_ns backward_time_taken_ns guards_expr
    serialized_bw_module min_cut_info_str""",
    added={"min_cut_info_str": (2, 13)},
)
#: Properties that a description has like attributes.
COMPUTED = Fields(f"{_SCHEMAS}:InputAliasInfo", "mutation_type").names
Fields(f"{_AOT}.aot_autograd_result:BundledCompiledBackward", "backward_state_indices")
Fields("torch._guards:Source", "name")


def name_of_source(source: object) -> str | None:
    """Where an input comes from, as Python would write it; ``None`` where that cannot be said."""
    try:
        name: object = getattr(source, "name", None)
        return str(name() if callable(name) else name)  # a method, or a property
    except Exception:  # noqa: BLE001 - some have no such thing, and say so in their own ways
        return None


def read_fields(fields: Fields, value: object) -> dict[str, object]:
    """Each by its name; ``None`` for those that this release does not have."""
    present = fields.present
    return {name: read_quietly(value, name) if name in present else None for name in fields.names}


def read_quietly(owner: object, name: str, *default: object) -> object:
    """Return what ``getattr`` does, without torch's warnings of what it is about to remove.

    Only deprecated options and what a module's ``__getattr__`` gives warn. Everything else is read
    as it is: to change the filters makes Python repeat warnings that it gives once.
    """
    if not isinstance(owner, ModuleType):
        return getattr(owner, name, *default)
    names = vars(owner)
    options: Mapping[str, object] = names.get("_config") or {}
    option = options.get(name)
    if name in names or (option is not None and not getattr(option, "deprecated", False)):
        return getattr(owner, name, *default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(owner, name, *default)


# -- options

functorch_config: Internal[FunctorchConfig] = Internal("torch._functorch.config")
inductor_config: Internal[InductorConfig] = Internal("torch._inductor.config")
dynamo_config: Internal[Config] = Internal("torch._dynamo.config")
shapes_config: Internal[Config] = Internal("torch.fx.experimental._config")
runtime_constant_folding: Internal[bool] = Internal(
    "torch._inductor.config:aot_inductor.use_runtime_constant_folding"
)
#: How many threads C++ is made for, if not for as many as there are; or whether for any number.
cpp_threads: Internal[int] = Internal("torch._inductor.config:cpp.threads")
cpp_dynamic_threads: Internal[bool] = Internal("torch._inductor.config:cpp.dynamic_threads")
pre_grad_pass_timing: Internal[str] = Internal(
    "torch._inductor.config:pre_grad_pass_timing", since=(2, 12), instead="they run early"
)
_debugging: Internal[bool] = Internal("torch._inductor.config:trace.enabled")
_enrich_profiler_metadata: Internal[bool] = Internal(
    "torch.fx.experimental._config:enrich_profiler_metadata"
)
Shape("torch._functorch.config", FunctorchConfig)
Shape("torch._inductor.config", InductorConfig)
Fields("torch._functorch.config", "_save_config_ignore")
Fields("torch._inductor.config", "_save_config_ignore _cache_config_ignore_prefix")

#: Options that say how to cache, or how to go about compiling, and nothing about what is compiled;
#: those that only print; and the path of the compiler, which a hit does not need and a reader may
#: not have.
CACHING_OPTIONS = (
    Fields("torch._inductor.config", "cpp.cxx cpp_cache_precompile_headers"),
    Fields(
        "torch._inductor.config",
        """autotune_num_choices_displayed developer_warnings disable_progress
        quiesce_async_compile_pool quiesce_async_compile_time verbose_progress
        worker_suppress_logging""",
    ),
    Fields("torch._functorch.config", "debug_partitioner"),
    Fields(
        "torch._functorch.config",
        """autograd_cache_allow_custom_autograd_functions bundled_autograd_cache
        enable_autograd_cache enable_remote_autograd_cache force_autograd_cache
        strict_autograd_cache""",
    ),
)
#: Those of Dynamo and of symbolic shapes that what comes after Dynamo reads as well.
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


# -- what torch keeps by itself

#: Its directory, which it makes; the environment names it from then on.
cache_dir: Internal[Callable[[], str]] = Internal(
    "torch._inductor.runtime.cache_dir_utils:cache_dir"
)
#: Has it forget what it has loaded from there, and where that was.
clear_caches: Internal[Callable[[], None]] = Internal(
    "torch._inductor.utils:clear_caches", feature=LOCKDOWN
)
#: What ``torch.compiler.load_cache_artifacts`` does with what it has read.
populate_caches: Internal[Function[object]] = Internal(
    "torch.compiler._cache:CacheArtifactManager.populate_caches", feature=LOCKDOWN
)
#: Whether it has no caches at all, of whatever kind.
force_disable_caches: Internal[bool] = Internal("torch.compiler.config:force_disable_caches")
#: The variable that sets it, for processes that are started.
NO_CACHES = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
#: Variables that name the directories in which it keeps what it compiles.
DIRECTORIES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


# -- custom passes, and whatever else keeps a graph from being cached

_PASSES = "torch._inductor.custom_graph_pass"

custom_graph_pass: Internal[type[CustomPass]] = Internal(f"{_PASSES}:CustomGraphPass")
custom_partitioner: Internal[type[CustomPass]] = Internal(f"{_PASSES}:CustomPartitionerFn")
custom_scheduler_pass: Internal[type[CustomPass]] = Internal(
    f"{_PASSES}:CustomSchedulerPass", since=(2, 13), instead="no such pass has a uuid()"
)
custom_solver: Internal[type[CustomPass]] = Internal(f"{_PASSES}:CustomKnapsackSolver")
custom_estimator: Internal[type[CustomPass]] = Internal(f"{_PASSES}:CustomRuntimeEstimator")
should_use_remote_fx_cache: Internal[Callable[[], bool]] = Internal(
    "torch._inductor.utils:should_use_remote_fx_graph_cache"
)
bisection_enabled: Internal[bool] = Internal(
    "torch._inductor.compiler_bisector:CompilerBisector.bisection_enabled"
)
has_frozen_params: Internal[Callable[[GraphModule], bool]] = Internal(
    "torch._inductor.freezing_utils:has_frozen_params"
)
backward_state: Internal[type] = Internal("torch.fx.experimental._backward_state:BackwardState")

# -- the compile that is under way

_SHAPES = "torch.fx.experimental.symbolic_shapes"

current_tracing_context: Internal[Callable[[], TracingContext | None]] = Internal(
    "torch._guards:TracingContext.try_get"
)
tracing: Internal[Callable[[TracingContext | None], AbstractContextManager[object]]] = Internal(
    "torch._guards:tracing"
)
tracing_context: Internal[Callable[[FakeMode], TracingContext]] = Internal(
    "torch._guards:TracingContext"
)
fake_mode: Internal[Function[FakeMode]] = Internal("torch._subclasses.fake_tensor:FakeTensorMode")
#: What a nested argument holds.
tree_leaves: Internal[Callable[[object], list[object]]] = Internal(
    "torch.utils._pytree:tree_leaves"
)
shape_env: Internal[Callable[[], ShapeEnv]] = Internal(f"{_SHAPES}:ShapeEnv")
source: Internal[type] = Internal("torch._guards:Source")
fake_tensor: Internal[type[Tensor]] = Internal("torch._subclasses.fake_tensor:FakeTensor")
#: An object that a graph takes, as tracing sees it, and the real one behind it.
script_object: Internal[type] = Internal("torch._library.fake_class_registry:FakeScriptObject")
(REAL_OBJECT,) = Words("torch._library.fake_class_registry:FakeScriptObject.__init__", "real_obj")
device_mesh: Internal[type[DeviceMesh]] = Internal("torch.distributed.device_mesh:DeviceMesh")
is_wrapper_subclass: Internal[Callable[[object], bool]] = Internal(
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass"
)
without_modes: Internal[Callable[[], AbstractContextManager[object]]] = Internal(
    "torch.utils._python_dispatch:_disable_current_modes"
)
Shape("torch._guards:TracingContext", TracingContext)
Shape("torch._guards:GuardsContext", GuardsContext)
Shape(f"{_SHAPES}:ShapeGuard", ShapeGuard)
Shape("torch.distributed.device_mesh:DeviceMesh", DeviceMesh)
Shape("torch._subclasses.fake_tensor:FakeTensorMode", FakeMode)
#: What guards on sizes call, by the names that they are printed with.
_guard_functions: Internal[dict[str, object]] = Internal(f"{_SHAPES}:SYMPY_INTERP")
Shape(f"{_SHAPES}:ShapeEnv", ShapeEnv)
Fields(f"{_SHAPES}:ShapeEnv", "tracked_fakes")
Fields(f"{_SHAPES}:TrackedFake", "fake symbolic_context")
Fields(f"{_SHAPES}:StatelessSymbolicContext", "constraint_sizes")
Fields(f"{_SHAPES}:StrictMinMaxConstraint", "vr")
Fields("torch.utils._sympy.value_ranges:ValueRanges", "lower upper")

#: What AOTAutograd finds out of inputs while it compiles, and Dynamo is to guard.
duplicate_inputs: Internal[Callable[[object, object], object]] = Internal(
    "torch._guards:DuplicateInputs"
)
storage_overlap: Internal[Callable[[list[object], list[object]], object]] = Internal(
    "torch._guards:StorageOverlap"
)
_overlapping: Internal[Function[set[int]]] = Internal(
    "torch._C._dynamo.guards:compute_overlapping_tensors"
)
Fields("torch._guards:DuplicateInputs", "input_source_a input_source_b")
Fields("torch._guards:StorageOverlap", "overlapping_sources non_overlapping_sources")


def shape_guards(context: TracingContext) -> Sequence[ShapeGuard]:
    """Guards on sizes that there are so far in a compile."""
    mode = getattr(context, "fake_mode", None)
    shapes: ShapeEnv | None = getattr(mode, "shape_env", None)
    return () if shapes is None else shapes.guards


def symbols_in(guard: ShapeGuard) -> set[object]:
    """What a guard on sizes is about."""
    return set(guard.expr.free_symbols)


def named_symbols(context: TracingContext, guard: ShapeGuard) -> dict[str, str] | None:
    """What each symbol in a guard is the size of; ``None`` if that is not known of one."""
    return _named(context, {str(symbol): symbol for symbol in symbols_in(guard)})


def _named(context: TracingContext, symbols: Mapping[str, object]) -> dict[str, str] | None:
    known = context.fake_mode.shape_env.var_to_sources
    named: dict[str, str] = {}
    for name, symbol in symbols.items():
        sources = known.get(symbol) or ()
        source = name_of_source(sources[0]) if sources else None
        if source is None:
            return None
        named[name] = source
    return named


def size_guard_holds(context: TracingContext, expression: str, named: Mapping[str, str]) -> bool:
    """Whether a guard on sizes holds of those that are compiled for now.

    Args:
        named: what its symbols are to be the sizes of.
    """
    return are_named(context, named) and bool(_evaluated(context, expression))


def are_named(context: TracingContext, named: Mapping[str, str]) -> bool:
    """Whether symbols of those names stand for these sizes in what is compiled for now."""
    symbols = context.fake_mode.shape_env.var_to_sources
    return _named(context, {str(each): each for each in symbols if str(each) in named}) == {**named}


def value_of_symbol(context: TracingContext, symbol: str) -> int | float | bool:
    """The size, in what is compiled for now, that a symbol stands for."""
    return _evaluated(context, symbol)


def _evaluated(context: TracingContext, expression: str) -> int | float | bool:
    """Evaluate with the sizes of this compile, which adds no guard (torch's own, until 2.14)."""
    sizes = context.fake_mode.shape_env.backed_var_to_val
    values = {str(symbol): size for symbol, size in sizes.items()}
    # What torch printed, out of a verified entry, as torch evaluates it when it adds the guard.
    return cast("int | float | bool", eval(expression, _guard_functions.get(), values))  # noqa: S307


def guard_on_sizes(context: TracingContext, expression: str) -> None:
    """Have a guard checked that holds of the sizes that are compiled for now."""
    if not context.fake_mode.shape_env.deserialize_symexpr(expression):
        raise ValueError(f"{expression} does not hold")


def written_guard(guard: ShapeGuard) -> str:
    """A guard as text that :func:`guard_on_sizes` reads."""
    return _expression_printer.get()().doprint(guard.expr)


def symbols_of(inputs: Sequence[object]) -> frozenset[object]:
    """The symbols that are inputs of a graph: torch's entries have guards on these."""
    import torch

    numbers = (value.node.expr for value in inputs if isinstance(value, torch.SymInt))
    return frozenset(symbol for symbol in numbers if getattr(symbol, "is_symbol", False))


def sizes_among(inputs: Sequence[object]) -> list[SymInt]:
    """The inputs that guards in torch's entries are about, in the order of their numbers."""
    import torch

    sizes = [value for value in inputs if isinstance(value, torch.SymInt)]
    return [size for size in sizes if size.node.hint is not None]


def name_of_size(size: SymInt) -> str | None:
    """What the program calls a size, as ``L['x'].size()[0]``, if torch knows."""
    sources = size.node.shape_env.var_to_sources.get(size.node.expr)
    return name_of_source(sources[0]) if sources else None


def value_of_size(size: SymInt) -> int:
    """The size that it is now; nothing is guarded because of this."""
    return int(size.node.hint)


def holds_of_sizes(guards: str, sizes: Sequence[SymInt], values: Sequence[int]) -> bool:
    """Whether guards of an entry of torch's hold of sizes that are ``values`` now."""
    if not sizes:
        return False
    return bool(sizes[0].node.shape_env.evaluate_guards_expression(guards, values))


def sources_of_guard(guard: object) -> tuple[str, list[object], list[object]] | None:
    """The kind of a guard of AOTAutograd's and the inputs it is on; ``None`` for another kind."""
    kind, parts = type(guard).__name__, getattr(guard, "__dict__", {})
    if type(guard) is duplicate_inputs.get():
        return kind, [parts["input_source_a"]], [parts["input_source_b"]]
    if type(guard) is storage_overlap.get():
        return kind, [*parts["overlapping_sources"]], [*parts["non_overlapping_sources"]]
    return None


def guard_holds(
    context: TracingContext, kind: str, some: Sequence[object], others: Sequence[object]
) -> bool:
    """Whether a guard on these inputs holds; nothing is guarded because of this."""
    if kind == "DuplicateInputs":
        return some[0] is others[0]
    with context.fake_mode.shape_env.suppress_guards():
        found = _overlapping.get()([*some, *others], symbolic=True)
    return found == set(range(len(some)))


def guard_on(kind: str, some: list[object], others: list[object]) -> object:
    """The guard of which :func:`sources_of_guard` said that.

    Raises:
        ValueError: it is of a kind that this release does not have.
    """
    if kind == "DuplicateInputs" and len(some) == len(others) == 1:
        return duplicate_inputs.get()(some[0], others[0])
    if kind == "StorageOverlap":
        return storage_overlap.get()(some, others)
    raise ValueError(f"no guard is a {kind} on {len(some)} and {len(others)} inputs")


#: Attributes of a graph module that are made from its graph.
GENERATED = Fields("torch.fx.graph_module:GraphModule", "_graph _code _lineno_map _prologue_start")


# -- first calls on fake tensors (DDPOptimizer)

_FAKIFIED = f"{_AOT}.runtime_wrappers:FakifiedOutWrapper"

answer_first_call: Internal[Function[object]] = Internal(f"{_FAKIFIED}.post_compile")
unbacked_symbols: Internal[Callable[[object], object]] = Internal(
    f"{_SHAPES}:free_unbacked_symbols"
)
_expression_printer: Internal[type[ExpressionPrinter]] = Internal(f"{_SHAPES}:SymExprPrinter")
Shape(_FAKIFIED, FirstCallWrapper)
Shape("torch._dynamo.backends.distributed:DDPOptimizerContext", SplitByDDP)


def is_first_call_fake() -> bool:
    """Whether the graph that is compiled now is to answer its first call with fake tensors."""
    context = current_tracing_context.get()()
    return context is not None and context.fakify_first_call


@contextlib.contextmanager
def freezing_unasked() -> Iterator[None]:
    """While the block runs, torch does not know that it is to freeze what it cannot freeze.

    Its check refuses every graph under the option; it freezes those without gradients.
    """
    import torch

    config = inductor_config.get()
    if not (config.freezing and torch.is_grad_enabled()):
        yield
        return
    with config.patch(freezing=False):
        yield


_keying = threading.local()


@contextlib.contextmanager
def backends_unasked() -> Iterator[None]:
    """While the block runs, :func:`are_backends_unasked` in this thread.

    A key has what users register with a backend, which is there without torch's own: to import all
    of those takes longer than the key, and a hit needs none.
    """
    before, _keying.unasked = getattr(_keying, "unasked", False), True
    try:
        yield
    finally:
        _keying.unasked = before


def are_backends_unasked() -> bool:
    """Whether backends need not be registered now; one that has a device of its own must be."""
    import torch

    if not getattr(_keying, "unasked", False):
        return False
    return torch._C._get_privateuse1_backend_name() == "privateuseone"


def passes_by_device(passes: Sequence[object]) -> dict[str, object]:
    """Which devices have which of the passes that a key has of backends, less those of none."""
    devices = list(custom_backend_passes.get())
    return {device: each for device, each in zip(devices, passes, strict=True) if each is not None}


@contextlib.contextmanager
def first_calls_unasked() -> Iterator[None]:
    """While the block runs, torch does not know that first calls are to be on fake tensors."""
    context = current_tracing_context.get()()
    if context is None or not context.fakify_first_call:
        yield
        return
    context.fakify_first_call = False
    try:
        yield
    finally:
        context.fakify_first_call = True


def stand_in_for_metadata() -> None:
    """Have torch find metadata of a graph that nobody compiles: DDPOptimizer insists on some."""
    context = current_tracing_context.get()()
    if context is not None and context.fakify_first_call and context.fw_metadata is None:
        context.fw_metadata = cast("RuntimeMetadata", object())


def written(number: SymInt) -> str:
    """A size as text that ``ShapeEnv.deserialize_symexpr`` reads."""
    return _expression_printer.get()().doprint(number.node.expr)


def boxed(function: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Mark ``function`` as one that takes its arguments as a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


# -- ranks that wait for each other while they compile

_sync_decisions: Internal[bool] = Internal("torch._functorch.config:_sync_decision_cross_ranks")
_sync_lookups: Internal[bool] = Internal(
    "torch._functorch.config:_sync_cache_decision_cross_ranks",
    since=(2, 15),
    instead="nothing: a hit beside a miss hangs",
)
_tunes_together: Internal[bool] = Internal("torch._inductor.config:distributed_max_autotune_gemm")
#: Both compare estimates, or with ``spmd_check`` graphs, across ranks.
_schedules_overlap: Internal[bool] = Internal(
    "torch._inductor.config:aten_distributed_optimizations.enable_overlap_scheduling"
)
_reorders_overlap: Internal[bool] = Internal(
    "torch._inductor.config:reorder_for_compute_comm_overlap"
)
_traces_together: Internal[bool] = Internal("torch._dynamo.config:enable_compiler_collectives")
default_store: Internal[Callable[[], SharedStore]] = Internal(
    "torch.distributed.distributed_c10d:_get_default_store", feature=RANKS
)
Shape("torch._C._distributed_c10d:Store", SharedStore, feature=RANKS)


def ranks_must_agree() -> bool:
    """Whether ranks of this job exchange data while they compile, so that all have to, or none.

    Not where torch's own lookups see to it already.
    """
    together = (
        _sync_decisions.get()
        or _tunes_together.get()
        or _schedules_overlap.get()
        or _reorders_overlap.get()
        or _traces_together.get()
    )
    if not together or _sync_lookups.find():
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# -- operators

operator: Internal[type[Operator]] = Internal("torch._ops:OpOverload")
operator_packet: Internal[type[OperatorPacket]] = Internal("torch._ops:OpOverloadPacket")
higher_order_operator: Internal[type] = Internal("torch._ops:HigherOrderOperator")
#: Whether graphs that call a higher-order operator may be cached: torch's checks ask the operator.
operator_cacheable: Internal[Callable[[object], bool]] = Internal(
    "torch._ops:HigherOrderOperator.cacheable"
)
#: What Dynamo makes of a call of a custom ``autograd.Function``.
custom_function: Internal[object] = Internal(
    "torch._functorch.autograd_function:autograd_function_apply"
)
custom_operators: Internal[Mapping[str, CustomOperator]] = Internal(
    "torch._library.custom_ops:OPDEFS"
)
fake_registry: Internal[Mapping[str, FakeRegistration]] = Internal(
    "torch._library.simple_registry:singleton._data"
)
dispatch_dump: Internal[Callable[[str], str]] = Internal("torch._C:_dispatch_dump")
_is_opaque: Internal[Callable[[type], bool]] = Internal(
    "torch._library.opaque_object:is_opaque_type"
)
#: What Inductor uses in place of sets.
ordered_set: Internal[type[Collection[object]]] = Internal("torch.utils._ordered_set:OrderedSet")
_operator_namespace: Internal[type[ModuleType]] = Internal("torch._ops:_OpNamespace")
Shape("torch._ops:OpOverload", Operator)
Shape("torch._library.custom_ops:CustomOpDef", CustomOperator)
Fields(
    "torch._library.custom_ops:CustomOpDef", "_autocast_dtype", added={"_autocast_dtype": (2, 13)}
)
Shape("torch._library.simple_registry:SimpleOperatorEntry", FakeRegistration)
Shape("torch._library.fake_impl:FakeImplHolder", FakeImplementation)
Shape("torch._library.utils:Kernel", FakeKernel)


def autocast_dtypes(definition: CustomOperator) -> Mapping[str, object]:
    """To what a custom operator has its inputs cast under autocast, by type of device."""
    if installed_release() >= (2, 13):
        found = attrgetter("_autocast_dtype")(definition)
    else:
        found = {name: getattr(definition, f"_autocast_{name}_dtype") for name in ("cpu", "cuda")}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


#: Tables of Inductor to which users may add functions.
decompositions: Internal[Mapping[object, Function[object]]] = Internal(
    "torch._inductor.decomposition:decompositions"
)
lowerings: Internal[Mapping[object, Function[object]]] = Internal(
    "torch._inductor.lowering:lowerings"
)
#: Where programs may put functions in place of torch's, beside ``_s3cache_autoload.PLACES``: what
#: is imported with the compiler.
LATER_PLACES = (
    "torch._inductor.decomposition:decompositions",
    "torch._inductor.decomposition:extra_random_decomps",
    "torch._inductor.lowering:lowerings",
    "torch._inductor.lowering:user_lowerings",
    "torch._inductor.lowering:_maybe_layout_constraints",
    "torch._higher_order_ops.utils:registered_hop_fake_fns",
    "torch._subclasses.fake_tensor:_DISPATCH_META_HANDLERS",
    "torch._inductor.decomposition",
    "torch._inductor.lowering",
)
# What the names of modules begin with whose functions and classes trace and lower graphs. Not
# Dynamo's: what it makes of a program is in the key.
_MAKING_CODE = (
    "torch._decomp",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._library",
    "torch._numpy",
    "torch._ops",
    "torch._prims",
    "torch._refs",
    "torch._subclasses",
    "torch.distributed.tensor",
    "torch.fx",
    "torch.nested._internal",
    "torch.utils._python_dispatch",
    "torch.utils._sympy",
    "torch.utils.checkpoint",
)
# These keep what was made, or run it.
_KEEPING_CODE = (
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._inductor.codecache",
    "torch._inductor.remote_cache",
    "torch._inductor.runtime.",
)
#: A class into which torch puts the code of each graph that it reads.
EXCHANGED = "torch.fx.graph_module._CodeOnlyModule"


def makes_code(module: str) -> bool:
    """Whether functions of the module of that name trace or lower graphs."""
    return module.startswith(_MAKING_CODE) and not module.startswith(_KEEPING_CODE)


# -- what programs register with Inductor

PATTERN_MATCHER = "torch._inductor.pattern_matcher"
BACKENDS = "torch._inductor.codegen.common"

pattern_pass: Internal[type[PatternPass]] = Internal(f"{PATTERN_MATCHER}:PatternMatcherPass")
Shape(f"{PATTERN_MATCHER}:PatternEntry", PatternEntry)
_pass_package: Internal[ModuleType] = Internal("torch._inductor.fx_passes")
_pattern_passes: tuple[int, list[tuple[str, PatternPass]]] = (0, [])


def pattern_passes() -> list[tuple[str, PatternPass]]:
    """What patterns are registered with, by its place; those of modules that are imported."""
    global _pattern_passes
    package = vars(_pass_package.get())
    if _pattern_passes[0] != len(package):
        found: dict[int, tuple[str, PatternPass]] = {}
        for name, module in sorted((n, m) for n, m in package.items() if type(m) is ModuleType):
            for attribute, value in list(vars(module).items()):
                if type(value) not in _NO_PASSES:
                    for which, each in _passes_in(value):
                        found.setdefault(id(each), (f"{name}.{attribute}{which}", each))
        _pattern_passes = len(package), list(found.values())
    return _pattern_passes[1]


# What most names in a module stand for.
_NO_PASSES = frozenset((FunctionType, BuiltinFunctionType, ModuleType, type, str, int, bool))


def _passes_in(value: object) -> Iterator[tuple[str, PatternPass]]:
    kind = pattern_pass.get()
    if isinstance(value, kind):
        yield "", value
    elif isinstance(value, (dict, list, tuple)) and value:
        named = value if isinstance(value, dict) else dict(enumerate(value[:9]))
        if isinstance(next(iter(named.values())), kind):
            yield from ((f"[{key}]", each) for key, each in named.items())


_device_codegens: Internal[Mapping[str, object]] = Internal(f"{BACKENDS}:device_codegens")
_device_overrides: Internal[Mapping[str, object]] = Internal(f"{BACKENDS}:device_op_overrides_dict")
custom_backend_passes: Internal[Mapping[str, object]] = Internal(
    f"{BACKENDS}:custom_backend_passes"
)
#: Imports all backends, most of which nobody needs, and registers them.
init_backends: Internal[Function[None]] = Internal(
    "torch._inductor.codecache:init_backend_registration"
)
_choices: Internal[Virtualized] = Internal("torch._inductor.virtualized:_choices")
_virtual: Internal[object] = Internal("torch._inductor.virtualized:threadlocal")
#: Calls of these stay in a graph whether or not anybody uses what they return.
side_effectful: Internal[set[object]] = Internal("torch.fx.node:_side_effectful_functions")
#: Which operators, and what is done for them on fake tensors; the first that agrees is asked.
fake_rules: Internal[list[tuple[object, object]]] = Internal(
    "torch._subclasses.fake_impls:op_implementations_checks"
)


def registries_by_device() -> list[tuple[str, Mapping[str, object]]]:
    """How code is made for each device: schedulers and wrappers, and what these call."""
    return [("backend", _device_codegens.get()), ("operations", _device_overrides.get())]


_default_handler: Internal[type] = Internal("torch._inductor.ops_handler:DefaultHandler")


def generated_operations() -> list[FunctionType]:
    """Functions of Inductor's that it makes from text, so that no file has their code."""
    values = vars(_default_handler.get()).values()
    return [each for each in values if isinstance(each, FunctionType)]


def choices_handler() -> object:
    """What decides between ways to compile something, if that was set; else ``None``."""
    return getattr(_virtual.get(), _choices.get()._key, None)


#: What is in there and computes nothing while something is compiled; programs replace these often.
NOT_COMPILED = frozenset(
    """
    __deepcopy__ __dir__ __format__ __reduce_ex__ __repr__ __setstate__ __slotnames__ __str__
    backward compile initial_seed load manual_seed save seed set_printoptions share_memory_ typename
    """.split()  # noqa: SIM905 - one word a line would be longer
)
#: What ``torch._VF`` finds its functions in, if nobody has put one of the same name into itself.
_variable_functions: Internal[type] = Internal("torch._C:_VariableFunctionsClass")


def contents(place: str) -> Mapping[object, object] | None:
    """What is in a namespace, a class or a table now; ``None`` until it is imported."""
    module, _, name = place.partition(":")
    found: object = sys.modules.get(module)
    if name:
        found = getattr(found, name, None)
    if found is None or isinstance(found, dict):
        return cast("dict[object, object] | None", found)
    return cast("Mapping[object, object]", vars(found))


def is_table(place: str) -> bool:
    """Whether all that is in it is used, by whatever name it is in there."""
    return isinstance(contents(place), dict) and ":" in place


def is_shadowed(place: str, name: str) -> bool:
    """Whether torch would find something else under ``name`` if it were not in that namespace."""
    module, _, kind = place.partition(":")
    if kind:
        bases = getattr(sys.modules[module], kind).__mro__[1:]
        return any(name in vars(base) for base in bases)
    return hasattr(builtins, name) or (
        module == "torch._VF" and hasattr(_variable_functions.get(), name)
    )


register_kernel: Internal[Function[object]] = Internal("torch.library:Library.impl")
_python_kernels: Internal[set[str]] = Internal("torch.library:_impls")


def registered_kernel(
    library: OperatorLibrary, op_name: object, fn: object, dispatch_key: str = "", **_: object
) -> tuple[str, object]:
    """What a call of :data:`register_kernel` registers: operator and key as torch notes, and it."""
    whole = op_name if isinstance(op_name, str) else cast("Operator", op_name).name()
    name = whole.rpartition("::")[2]
    return f"{library.ns}/{name}/{dispatch_key or library.dispatch_key}", fn


def python_kernels() -> set[str]:
    """Operators and keys for which there is a kernel in Python, as ``aten/silu/AutogradCPU``."""
    return _python_kernels.get()


#: How the dispatcher tells the key and the source file of each kernel of an operator, and its own.
REGISTERED_AT = re.compile(r"^(\S+): registered at (.+?):\d+ ", re.MULTILINE)
DEFINED_AT = re.compile(r"^debug: registered at (.+?):\d+$", re.MULTILINE)


@functools.cache
def built_in() -> str:
    """The directory that torch's own C++ was built in; ``""`` if the dispatcher does not tell."""
    defined = DEFINED_AT.search(dispatch_dump.get()("aten::relu"))
    root, found, _ = (defined[1] if defined else "").partition("build/aten/")
    return root if found else ""


def is_operator(value: object) -> bool:
    """Whether ``value`` is an operator, an overload of one, or of higher order."""
    return not _kinds_of_operators().isdisjoint(type(value).__mro__)


def is_higher_order(value: object) -> bool:
    """Whether ``value`` is an operator of higher order."""
    return higher_order_operator.get() in type(value).__mro__


@functools.cache
def _kinds_of_operators() -> frozenset[type]:
    """Not for ``isinstance``: one is abstract, which asks all of its subclasses, 3 ms in all."""
    return frozenset((operator.get(), operator_packet.get(), higher_order_operator.get()))


def inside_of_ordered_set(value: Collection[object]) -> dict[object, None]:
    """The dictionary that it is made of, whose keys are what is in it."""
    return cast("dict[object, None]", value._dict)  # type: ignore[attr-defined]


def is_dtype(value: object) -> bool:
    """Whether it is the type of the elements of a tensor."""
    import torch

    return isinstance(value, torch.dtype)


def is_opaque_type(kind: type) -> bool:
    """Whether graphs hold objects of this class of the user's as they are."""
    return _is_opaque.get()(kind)


def sharding_rules(kind: type) -> list[tuple[object, object]]:
    """How operators work on distributed tensors, by operator; ``kind`` is the class of those."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    propagator = getattr(dispatcher, "sharding_propagator", None)
    tables = (
        (propagator, "op_to_rules"),
        (propagator, "op_strategy_funcs"),
        (propagator, "op_single_dim_strategy_funcs"),
    )
    rules = [each for owner, table in tables for each in getattr(owner, table, {}).items()]
    return rules + sharding_handlers(kind)


def sharding_handlers(kind: type) -> list[tuple[object, object]]:
    """Which operators on distributed tensors are not done by rules; torch changes some at times."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return list(getattr(dispatcher, "_custom_op_handlers", {}).items())


_higher_order: Internal[dict[str, object]] = Internal("torch._ops:_higher_order_ops")


def higher_order_operators() -> dict[str, object]:
    """Those that were made so far, by name."""
    return _higher_order.get()


def higher_order_namespace() -> dict[str, object]:
    """Where programs find them: those that they have asked for."""
    import torch

    return vars(torch.ops.higher_order)


@functools.cache
def is_kind_of_namespace(kind: type) -> bool:
    """Whether such objects find operators by their names, as ``torch.ops.aten`` does."""
    return _operator_namespace.get() in kind.__mro__


@functools.cache
def is_kind_of_packet(kind: type) -> bool:
    """Whether such objects hold the overloads of an operator."""
    return operator_packet.get() in kind.__mro__


@functools.cache
def is_kind_of_operator(kind: type) -> bool:
    """Whether such objects are overloads of operators, or of higher order."""
    return not {operator.get(), higher_order_operator.get()}.isdisjoint(kind.__mro__)


def full_name(value: object) -> str:
    """The name of a namespace, packet or operator, as the dispatcher has it."""
    if isinstance(value, _operator_namespace.get()):
        return str(value.name)
    if isinstance(value, operator_packet.get()):
        return str(value._qualified_op_name)  # type: ignore[attr-defined]
    return cast("Operator", value).name()


def full_name_there(home: Mapping[str, object], name: str) -> str:
    """The same of what torch itself keeps under ``name`` in what ``home`` is the inside of."""
    packet, space = home.get("_qualified_op_name"), home.get("name")
    if isinstance(packet, str):
        return packet if name == "default" else f"{packet}.{name}"
    return f"{space}::{name}" if isinstance(space, str) else name


def is_place_of_overload(home: Mapping[str, object], name: str) -> bool:
    """Whether torch keeps an overload of an operator under ``name`` in that packet."""
    overloads = home.get("_overload_names", ())
    return ("" if name == "default" else name) in cast("Collection[str]", overloads)


def is_place_of_packet(home: Mapping[str, object], name: str) -> bool:
    """Whether torch keeps an operator under ``name`` in that namespace."""
    if name in _what_namespaces_have():
        return False
    return DEFINED_AT.search(dispatch_dump.get()(full_name_there(home, name))) is not None


@functools.cache
def _what_namespaces_have() -> frozenset[str]:
    return frozenset(vars(_operator_namespace.get()("s3cache")))


def are_identical(some: Collection[object], others: Collection[object]) -> bool:
    """Whether both hold the very same objects, which is quickly seen."""
    return len(some) == len(others) and all(map(is_, some, others))


def tables_of(values: Sequence[Operator]) -> list[dict[object, object]]:
    """What each does in Python: by key, by class of tensors or modes, and by transform."""
    return list(itertools.chain.from_iterable(map(_tables, values)))


_tables: Callable[[Operator], tuple[dict[object, object], ...]] = attrgetter(
    "py_kernels", "python_key_table", "functorch_table"
)


def packet_of(function: object) -> object:
    """The operator that ``function`` is an overload of; ``None`` if it is none."""
    return getattr(function, "overloadpacket", None)


Behaviour(
    "torch._C:_dispatch_dump",
    "tells where an operator is defined, and its kernels are registered",
    lambda: (
        (dump := dispatch_dump.get()("aten::relu")) is not None
        and REGISTERED_AT.search(dump) is not None
        and DEFINED_AT.search(dump) is not None
    ),
)


def has_flexible_layout(operator: Operator) -> bool:
    """Return True if Inductor may lay out inputs of a custom operator otherwise than traced."""
    names = {str(tag).rpartition(".")[2] for tag in operator.tags}
    if any(name.startswith("needs_") for name in names):
        return False
    default = getattr(functorch_config.get(), "custom_op_default_layout_constraint", "")
    return "flexible_layout" in {*names, default}


# -- functions that compiled autograd makes as it goes

#: The module of all of them.
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_COMPILED = COMPILED_AUTOGRAD
_MAKES_PROLOGUE = "AutogradCompilerInstance.proxy_call_aot_backward"
_WRITES_PROLOGUE = f"{_AOT}.runtime_wrappers:_codegen_backward_prologue"

autograd_node: Internal[type[AutogradNode]] = Internal(f"{_COMPILED}:Op")
(_PROLOGUE,) = Words(f"{_COMPILED}:{_MAKES_PROLOGUE}", "call_aot_bwd_prologue")
(PROLOGUE_CELL,) = Words(
    f"{_COMPILED}:{_MAKES_PROLOGUE}",
    "bw_prologue_fn",
    since=(2, 13),
    instead="code that nobody can read: those graphs are not cached",
)
#: The prologue that compiled autograd makes for the backward pass of a compiled graph.
PROLOGUE = f"{_MAKES_PROLOGUE}.<locals>.{_PROLOGUE}"
#: Globals of the code that AOTAutograd generates for a prologue: what it calls, ...
PROLOGUE_CALLS, PROLOGUE_TANGENTS = Words(
    _WRITES_PROLOGUE, "_process_tangent_ _tangent_metas_", since=(2, 13)
)
#: ... and what its error messages say.
PROLOGUE_MESSAGES = Words(
    _WRITES_PROLOGUE, "_tangent_descs_ _compile_id_ _stack_traces_", since=(2, 13)
)
Shape(f"{_COMPILED}:Op", AutogradNode)


# -- how Inductor is called, and a backward that it lowers later on

compile_fx: Internal[Function[object]] = Internal("torch._inductor.compile_fx:compile_fx")
aot_module: Internal[Function[object]] = Internal(
    "torch._dynamo.backends.common:aot_module_simplified"
)
#: What holds the decompositions that a backend of the user's has given.
given_decompositions: Internal[type[DecompositionTable]] = Internal(
    "torch._inductor.compile_fx:_ConstantDecompTable", since=(2, 13)
)
_decompositions_with_random: Internal[MemoizedTable] = Internal(
    "torch._inductor.decomposition:fast_random_decomps"
)
_random_decompositions: Internal[Mapping[object, object]] = Internal(
    "torch._inductor.decomposition:extra_random_decomps"
)
_fallback_random: Internal[bool] = Internal("torch._inductor.config:fallback_random")


def inner_compiler(compiler: object) -> object:
    """What Inductor lowers by, if it has made ``compiler`` for AOTAutograd; else ``None``.

    It makes one anew for each graph, around what its caller has given it.
    """
    function: object = getattr(compiler, "compiler_fn", None)
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, FunctionType) or not has_code_of_torch(function):
        return None
    if function.__code__.co_name != "fw_compiler_base":
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("inner_compile")
    return None if cell is None else cell.cell_contents


def usual_decompositions() -> Mapping[object, object]:
    """The table that Inductor decomposes by where it is given none."""
    if _fallback_random.get():
        return decompositions.get()
    return _decompositions_with_random.get()()


def stale_decompositions() -> tuple[Mapping[object, object], Mapping[object, object]] | None:
    """What torch decomposes by, and what it would if it had not remembered it; ``None`` if equal.

    It makes one table of two when it first needs it, and what is put into those later is not in it.
    """
    memo = _decompositions_with_random.get()
    if not memo.cache_info().currsize:
        return None
    now, fresh = memo(), {**decompositions.get(), **_random_decompositions.get()}
    return None if now == fresh else (now, fresh)


cpp_wrapper_options: Internal[Callable[[], dict[str, object]]] = Internal(
    "torch._inductor.compile_fx:get_cpp_wrapper_config"
)
disable_dynamo: Internal[Function[Function[object]]] = Internal("torch._dynamo:disable")
keeps_graph: Internal[Callable[[], bool]] = Internal(
    "torch._C._autograd:_get_current_graph_task_keep_graph"
)
_BACKWARD = f"{_AOT}.aot_autograd_result:SerializedGraphModule"
deserialize_backward: Internal[Function[object]] = Internal(f"{_BACKWARD}.deserialize")
Shape(_BACKWARD, BackwardModule)


def interpreted(module: GraphModule) -> Callable[[list[object]], object]:
    """A graph that was traced, run operator by operator."""
    import torch

    def run(args: list[object]) -> object:
        values = list(args)
        args.clear()
        with torch.no_grad():
            return module(*values)

    return boxed(run)


# -- code that Inductor generated

compile_fx_inner: Internal[Function[CompiledGraph]] = Internal(
    "torch._inductor.compile_fx:_compile_fx_inner"
)
_event_log: Internal[Callable[[], EventLog]] = Internal(
    "torch._dynamo.utils:get_chromium_event_logger", feature=TRACES
)
Shape("torch._dynamo.utils:ChromiumEventLogger", EventLog, feature=TRACES)


def begin_event(name: str, now_ns: int) -> Callable[[int, dict[str, object]], None] | None:
    """Begin an event among torch's own of a compile, on this thread.

    Returns:
        What ends it, and is told when that is and what there is to say; ``None`` if one of that
        name is under way, from which torch could not tell it.
    """
    log = _event_log.get()()
    if name in log.get_stack():
        return None
    log.log_event_start(name, now_ns, {}, False)

    def end(end_ns: int, about: dict[str, object]) -> None:
        log.log_event_end(name, end_ns, about, now_ns, False)

    return end


_trace_log: Internal[Logger] = Internal("torch._logging._internal:trace_log", feature=TRACES)
_trace: Internal[Function[None]] = Internal("torch._logging:trace_structured", feature=TRACES)

_profiler_runs: Internal[bool] = Internal(
    "torch.autograd.profiler:_is_profiler_enabled", feature=TRACES
)


def writes_trace() -> bool:
    """Whether torch writes the log that ``TORCH_TRACE`` asks for. Imports nothing."""
    return TORCH in sys.modules and bool(_trace_log.get().handlers)


def is_traced() -> bool:
    """Return whether torch shows events to somebody: in that log, or in a profiler's."""
    return writes_trace() or bool(_profiler_runs.get())


def trace_event(event: dict[str, object], *, lane: int) -> None:
    """Write an event that is of no compile to torch's log, beside those of compiles.

    Args:
        event: in the JSON of ``chrome://tracing``.
        lane: where it is drawn; those of compiles are in 0.
    """
    whole = {"cat": "s3cache", "pid": 0, "tid": lane, **event}
    _trace.get()("chromium_event", payload_fn=lambda: whole, suppress_context=True)


count_calls: Internal[Callable[[Graph], int]] = Internal("torch._dynamo.utils:count_calls")
compiled_graph: Internal[type[CompiledGraph]] = Internal(
    "torch._inductor.output_code:CompiledFxGraph"
)
#: What its ``__del__`` asks for.
RUNNER = "compiled_fn_runner"
load_library: Internal[Function[Callable[[], object]]] = Internal(
    f"{_CODE}:CppCodeCache.load_async"
)
load_module: Internal[Function[object]] = Internal(f"{_CODE}:PyCodeCache.load_by_key_path")
run_module: Internal[Function[ModuleType]] = Internal(f"{_CODE}:_reload_python_module")
#: Has the Python code of a graph that was unpickled run, from a file that it writes, if need be.
rebuild_module: Internal[Function[str]] = Internal(
    "torch._inductor.output_code:CompiledFxGraph.after_deserialization"
)
_extern_choice: Internal[type] = Internal("torch._inductor.select_algorithm:ExternKernelChoice")


def extern_kernels() -> set[str]:
    """Names in ``extern_kernels`` that importing torch puts there, before anything is lowered.

    Those are variables of its modules; what a function registers while it lowers is none.
    """
    kind = _extern_choice.get()
    return {
        str(vars(value)["name"])
        for name, module in list(sys.modules.items())
        if name.startswith(f"{TORCH}._inductor.")
        for value in list(vars(module).values())
        if type(value) is kind
    }


path_of_module: Internal[Callable[[str, str], tuple[str, str, str]]] = Internal(f"{_CODE}:get_path")
#: Writes the kernels of an entry to Triton's directory, and loads some of them from there.
emit_triton_bundle: Internal[Function[object]] = Internal(
    "torch._inductor.triton_bundler:TritonBundler.read_and_emit"
)
#: Makes the bundle of a graph's kernels, once the graph is compiled.
collect_triton_bundle: Internal[Function[object]] = Internal(
    "torch._inductor.triton_bundler:TritonBundler.collect"
)
_WINNERS, _AUTOTUNERS = Fields(
    "torch._inductor.triton_bundler:TritonBundler",
    "_winners _static_autotuners",
    added={"_winners": (2, 13)},
).names
_triton_file_name: Internal[Callable[[str], str]] = Internal(
    "torch._inductor.runtime.runtime_utils:triton_hash_to_path_key"
)


def keep_launched_kernels(bundler: object) -> None:
    """Have the bundle hold every kernel that an autotuner in it launches.

    Once one configuration was chosen for a graph, torch drops the kernels that were not chosen, and
    with them those of autotuners that had nothing to choose between.
    """
    winners: set[str] | None = getattr(bundler, _WINNERS, None)
    if not winners:
        return
    statics: Sequence[StaticKernel] = getattr(bundler, _AUTOTUNERS) or ()
    winners.update(
        _triton_file_name.get()(result.kernel.hash)
        for static in statics
        for result in static.kernel.compile_results
    )


triton_directory: Internal[Callable[[int], str]] = Internal(
    "torch._inductor.runtime.runtime_utils:triton_cache_dir"
)
#: What remembers which configuration of a kernel was the fastest, in a file beside its source.
autotune_cache: Internal[type[AutotuneCache]] = Internal(
    "torch._inductor.runtime.autotune_cache:AutotuneCache"
)
Shape("torch._inductor.runtime.autotune_cache:AutotuneCache", AutotuneCache)
#: The kernels that a compiled graph came with, or that were compiled for it.
(TRITON_BUNDLE,) = Fields("torch._inductor.output_code:CompiledFxGraph", "_triton_bundle").names


def with_triton_kernels(graphs: Iterable[object]) -> list[object]:
    """Those of compiled graphs that have some."""
    bundles = ((graph, getattr(graph, TRITON_BUNDLE, None)) for graph in graphs)
    return [graph for graph, bundle in bundles if bundle and bundle.kernel_artifacts]


_AUTOTUNER = "torch._inductor.runtime.triton_heuristics:CachingAutotuner"
Shape(_AUTOTUNER, CachingAutotuner)
#: What it keeps once it is loaded, which no pickle can hold.
LAUNCHERS, RELOAD = Fields(_AUTOTUNER, "launchers _reload_kernel").names
#: What Triton's function keeps of the process and the file that it was read from, if it does.
BINDERS, FILE = "device_caches", "file_name"


def triton_environment() -> dict[str, str]:
    """The variables that Triton makes a part of its own key and that are set; none without it."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    except ImportError:
        return {}
    return dict(get_cache_invalidating_env_vars())


cpp_compiler: Internal[Callable[[], str]] = Internal(
    "torch._inductor.cpp_builder:get_cpp_compiler", feature=COMPILER_NAME
)
compiler_version: Internal[Callable[[str], str]] = Internal(
    "torch._inductor.cpp_builder:get_compiler_version_info", feature=COMPILER_NAME
)
inductor_backend: Internal[Function[Function[Function[object]]]] = Internal(
    "torch:_TorchCompileInductorWrapper", feature=BACKEND
)
Shape("torch._inductor.output_code:CompiledFxGraph", CompiledGraph)
Shape(f"{_CODE}:CppCodeCache", CppLibraries)
Shape(f"{_CODE}:PyCodeCache", PythonModules)

#: What tells one kernel from another, of the arguments it is compiled or loaded with.
KERNEL_ARGUMENTS = Words(
    f"{_CODE}:CppCodeCache.load_async",
    "main_code optimized_code device_type extra_flags",
)


# -- Dynamo

graph_break_reasons: Internal[list[CompileReason]] = Internal(
    "torch._dynamo.utils:graph_break_reasons", feature=WATCHING
)
#: Entered for as long as Dynamo, or a backward that was left for later, compiles.
while_compiling: Internal[Function[AbstractContextManager[None]]] = Internal(
    "torch._dynamo.callback:CompilationCallbackHandler.install_callbacks", feature=WATCHING
)
optimized_module: Internal[type] = Internal(
    "torch._dynamo.eval_frame:OptimizedModule", feature=WATCHING
)
Shape("torch._dynamo.output_graph:GraphCompileReason", CompileReason, feature=WATCHING)
(ORIGINAL_CALLABLE,) = Words(
    "torch._dynamo.eval_frame:innermost_fn", "_torchdynamo_orig_callable", feature=WATCHING
)


def describe_break(reason: CompileReason) -> dict[str, str]:
    """Why Dynamo ended a graph, in one line, and where in the user's program."""
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return {"reason": reason.reason.strip().partition("\n")[0], "where": where}


# -- automatic dynamic shapes

_PGO = "torch._dynamo.pgo"

#: Where profiles are fetched from, and put to, if torch is to share them; or ``None``.
remote_profiles: Internal[Function[object]] = Internal(f"{_PGO}:get_remote_cache", feature=LOCKDOWN)
update_automatic_dynamic: Internal[Function[ShapeState]] = Internal(
    f"{_PGO}:update_automatic_dynamic", feature=PROFILES
)
put_code_state: Internal[Callable[[], None]] = Internal(
    "torch._dynamo.convert_frame:put_code_state", feature=PROFILES
)
automatic_dynamic_shapes: Internal[bool] = Internal(
    "torch._dynamo.config:automatic_dynamic_shapes", feature=PROFILES
)
cache_key_tag: Internal[str] = Internal("torch.compiler.config:cache_key_tag", feature=PROFILES)
_changes: Internal[object] = Internal(f"{_PGO}:auto_dynamic", feature=PROFILES)
Shape(f"{_PGO}:FrameStateSizeEntry", ShapeState, feature=PROFILES)
Shape("torch._dynamo.symbolic_convert:InstructionTranslatorBase", Translator, feature=PROFILES)


def changing(state: ShapeState) -> tuple[tuple[bool, ...] | None, tuple[bool, ...] | None]:
    """Which sizes and strides change; ``None`` where that is not known, as of a number."""
    changes = _changes.get()
    sizes, strides = (
        tuple(part is changes for part in parts) if isinstance(parts, tuple) else None
        for parts in (state.size, state.stride)
    )
    return sizes, strides


def with_changing(
    state: ShapeState, sizes: tuple[bool, ...] | None, strides: tuple[bool, ...] | None
) -> ShapeState:
    """A copy of what was seen, with what :func:`changing` said of another one.

    A number stays as it was seen: it has no tuple of sizes.
    """
    changes, made = _changes.get(), copy.copy(state)
    for name, flags in (("size", sizes), ("stride", strides)):
        parts: object = getattr(made, name)
        if isinstance(parts, tuple) and flags is not None and len(parts) == len(flags):
            marked = (changes if flag else part for part, flag in zip(parts, flags, strict=True))
            setattr(made, name, tuple(marked))
    return made


# -- settings of the process

view_replay_enabled: Internal[Callable[[], bool]] = Internal("torch._C:_is_view_replay_enabled")
autocast_devices: Internal[Callable[[], list[str]]] = Internal(
    "torch._C:_autocast_supported_devices"
)
attention_priority: Internal[Callable[[], list[int]]] = Internal("torch._C:_get_sdp_priority_order")
