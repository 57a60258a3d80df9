"""The internals of torch that s3cache uses, with the releases that have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from logging import Logger
from types import ModuleType
from typing import TYPE_CHECKING, Any

from s3cache.torch_api import AnyClass, AnyFunction, AnyObject, Fields, Flag, Internal, Predicate
from s3cache.torch_api.protocols import Function, KeyPickler, SharedStore

if TYPE_CHECKING:
    from torch import Tensor

# Features that can be off alone: the names that only they need are declared with them.
TORCH_KEY = "remembering torch's hash of its own source"
KEY_LOGS = "showing key components in torch's logs"
WATCHING = "watching a program for s3cache check and warm"
TRACES = "showing lookups and saves in torch's traces"
# Their users have a fallback.
BACKEND = 'backend="s3cache"'
LOCKDOWN = "private directories for torch's own caches"
AGREEMENT = "hits on which processes must agree"
HOLDING = "saving only graphs of frames that Dynamo accepted"

LATE_CODE = "importing parts of the compiler when the code of a graph calls them"

TORCH = "torch"
DYNAMO = "torch._dynamo"

_AOT = "torch._functorch._aot_autograd"
_CACHE = f"{_AOT}.autograd_cache"
_DETAILS = f"{_CACHE}:AOTAutogradCacheDetails"
_PICKLER = f"{_CACHE}:AOTAutogradCachePickler"
_ENTRIES = f"{_CACHE}:AOTAutogradCache"
_RESULT = f"{_CACHE}:GenericAOTAutogradResult"
_FUNCTORCH = "torch._functorch.config"
_INDUCTOR = "torch._inductor.config"
_CODE = "torch._inductor.codecache"
_COMPILE = "torch._inductor.compile_fx"
DECOMPOSITIONS = "torch._inductor.decomposition"
_FX = f"{_CODE}:FxGraphCache"
_FX_DETAILS = f"{_CODE}:FxGraphHashDetails"
_FX_PICKLER = f"{_CODE}:FxGraphCachePickler"
_GRAPH = "torch._inductor.output_code:CompiledFxGraph"
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_FAKE = "torch._subclasses.fake_tensor"
_PGO = "torch._dynamo.pgo"
_BUNDLER = "torch._inductor.triton_bundler:TritonBundler"

# -- options

functorch_config = AnyObject(_FUNCTORCH)
inductor_config = AnyObject(_INDUCTOR)
dynamo_config = AnyObject("torch._dynamo.config")
shapes_config = AnyObject("torch.fx.experimental._config")
runtime_constant_folding = Flag(f"{_INDUCTOR}:aot_inductor.use_runtime_constant_folding")
#: The fixed number of threads for generated C++, and whether its code supports any number.
cpp_threads = Internal[int](f"{_INDUCTOR}:cpp.threads")
cpp_dynamic_threads = Flag(f"{_INDUCTOR}:cpp.dynamic_threads")
pre_grad_pass_timing = Internal[str](f"{_INDUCTOR}:pre_grad_pass_timing", since=(2, 12))
debugging = Flag(f"{_INDUCTOR}:trace.enabled")
fallback_random = Flag(f"{_INDUCTOR}:fallback_random")
#: Turns all of torch's caches off; and the environment variable that sets it.
force_disable_caches = Flag("torch.compiler.config:force_disable_caches")
NO_CACHES = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
enrich_profiler_metadata = Flag("torch.fx.experimental._config:enrich_profiler_metadata")
Fields(
    _INDUCTOR,
    """freezing cpp_wrapper cpu_backend max_autotune max_autotune_gemm
    unsafe_marked_cacheable_functions pre_grad_custom_pass post_grad_custom_pre_pass
    post_grad_custom_post_pass joint_custom_pre_pass joint_custom_post_pass _pre_fusion_custom_pass
    _post_fusion_custom_pass _fuse_ddp_communication_passes custom_partitioner_fn
    _save_config_ignore _cache_config_ignore_prefix""",
)
Fields(
    _FUNCTORCH,
    """joint_custom_pass activation_memory_budget_runtime_estimator
    activation_memory_budget_solver _save_config_ignore""",
)
#: Options for caching and for the process of compiling that do not affect the code; and the path of
#: the C++ compiler, which a hit does not need and a reader may not have.
CACHING_OPTIONS = (
    Fields(
        _INDUCTOR,
        """cpp.cxx cpp_cache_precompile_headers autotune_num_choices_displayed developer_warnings
        disable_progress quiesce_async_compile_pool quiesce_async_compile_time verbose_progress
        worker_suppress_logging""",
    ),
    Fields(
        _FUNCTORCH,
        """debug_partitioner autograd_cache_allow_custom_autograd_functions bundled_autograd_cache
        enable_autograd_cache enable_remote_autograd_cache force_autograd_cache
        strict_autograd_cache""",
    ),
)
#: Options of Dynamo and of symbolic shapes that are also read after Dynamo.
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
# Whether processes exchange data: the last three compare estimates, or graphs with ``spmd_check``.
EXCHANGING = (
    Flag(f"{_FUNCTORCH}:_sync_decision_cross_ranks"),
    Flag(f"{_INDUCTOR}:distributed_max_autotune_gemm"),
    Flag(f"{_INDUCTOR}:aten_distributed_optimizations.enable_overlap_scheduling"),
    Flag(f"{_INDUCTOR}:reorder_for_compute_comm_overlap"),
    Flag("torch._dynamo.config:enable_compiler_collectives"),
)
sync_lookups = Flag(f"{_FUNCTORCH}:_sync_cache_decision_cross_ranks", since=(2, 15))
default_store = Internal[Callable[[], SharedStore]](
    "torch.distributed.distributed_c10d:_get_default_store", feature=AGREEMENT
)
groups = AnyObject("torch.distributed.distributed_c10d:_world", feature=AGREEMENT)
ASYNC_COMPILE = "torch._inductor.async_compile"
compile_pool = AnyObject(f"{ASYNC_COMPILE}:AsyncCompile.pool")
view_replay_enabled = Predicate("torch._C:_is_view_replay_enabled")
#: The name of a device that a program has added; a placeholder without one.
added_device = Internal[Callable[[], str]]("torch._C:_get_privateuse1_backend_name")
autocast_devices = AnyFunction("torch._C:_autocast_supported_devices")
attention_priority = Internal[Callable[[], list[int]]]("torch._C:_get_sdp_priority_order")

# -- keys of whole graphs

autograd_cache_key = Internal[Function[tuple[str, list[str]]]](f"{_CACHE}:autograd_cache_key")
#: Whether torch makes up a random key for a graph that has none (``aot_compile``).
makes_keys_up = Flag(f"{_FUNCTORCH}:bypass_autograd_cache_key")
check_cacheable = Internal[Function[None]](f"{_CACHE}:check_cacheable")
check_node_safe = Internal[Function[None]](f"{_CACHE}:check_node_safe")
key_details = AnyClass(_DETAILS)
get_hash = Internal[Callable[[KeyPickler, object], str]](f"{_PICKLER}.get_hash")
bypass_error = Internal[type[Exception]](f"{_CACHE}:BypassAOTAutogradCache")
AUTOGRAD_PREFIX = Internal[str](f"{_CACHE}:AOTAUTOGRAD_CACHE_PREFIX", since=(2, 13))
#: Formats a global of generated code in keys.
format_global = AnyFunction(f"{_PICKLER}._format_global_for_cache_key", since=(2, 13))
sanitized = AnyFunction(f"{_CACHE}:sanitize_gm_for_cache")
torch_key = AnyFunction(f"{_CODE}:torch_key", feature=TORCH_KEY)
set_key = AnyFunction(f"{_CODE}:torch_key.set", feature=TORCH_KEY)
codegen = AnyClass("torch.fx.graph:CodeGen")
#: The part of torch's key for context functions of checkpointed regions; it refuses some.
context_hashes = Internal[Function[list[object]]](f"{_CACHE}:_collect_context_fn_hashes")
#: Attributes of :class:`KeyDetails` that are options of config modules.
CONFIG_DETAILS = Fields(
    _DETAILS,
    "autograd_config inductor_config inductor_config_comms",
    added={"inductor_config_comms": (2, 13)},
)
PROVENANCE_DETAILS = Fields(_DETAILS, "provenance_tracking_level", since=(2, 12))
#: Passes for each device that has been registered so far.
(PASSES_OF_BACKENDS,) = Fields(_DETAILS, "custom_backend_passes")
#: An option for caching that does not affect the code.
CACHING_DETAILS = Fields(_DETAILS, "precompile_enabled")
#: Until 2.12, torch's key does not distinguish graphs without code for the processor.
(ASKS_FOR_CPU_CODE,) = Fields(_DETAILS, "_may_generate_cpu_cpp_code", since=(2, 13))
#: Attributes of a graph module that are generated from its graph.
GENERATED = Fields("torch.fx.graph_module:GraphModule", "_graph _code _lineno_map _prologue_start")
#: The key for a node's value in its metadata: after Dynamo, after AOTAutograd.
NODE_VALUES = ("example_value", "val")
#: The key for the context function of a checkpointed region in a graph module.
(CHECKPOINT_CONTEXT,) = Fields(f"{_CACHE}:_collect_context_fn_hashes", "_checkpoint_context_fn")
#: Metadata of a node for a function of ``fx.wrap``: generated code calls it by its name.
WRAPPED, WRAPPED_HASH = Fields(f"{_CACHE}:check_node_safe", "is_wrapped user_cache_hash")

# -- entries of whole graphs

try_load = AnyFunction(f"{_ENTRIES}.try_load")
iterate_over_candidates = AnyFunction(f"{_ENTRIES}.iterate_over_candidates")
evaluate_guards = Predicate(f"{_ENTRIES}.evaluate_guards")
save = AnyFunction(f"{_ENTRIES}.save")
write_to_local_cache = AnyFunction(f"{_ENTRIES}._write_to_local_cache")
pickle_entry = Internal[Function[bytes | None]](f"{_ENTRIES}._pickle_entry")
find_unpicklable_field = AnyFunction(f"{_ENTRIES}._find_unpicklable_field")
#: torch's own remote cache, for users who have one.
remote_cache = AnyFunction(f"{_ENTRIES}.get_remote_cache")
aot_result = AnyClass(_RESULT)
wrap_post_compile = AnyFunction(f"{_RESULT}.wrap_post_compile")
miss_error = Internal[type[Exception]](f"{_CACHE}:FXGraphCacheMiss")
should_use_local_cache = Predicate("torch._functorch.aot_autograd:should_use_local_autograd_cache")
#: The value of torch's option, and the function that lookups call.
uses_remote_cache = Predicate(f"{_CACHE}:should_use_remote_autograd_cache")
should_use_remote_cache = Predicate(
    "torch._functorch.aot_autograd:should_use_remote_autograd_cache"
)
#: Two modules call it, under different names.
should_bundle = Predicate(f"{_CACHE}:should_bundle_autograd_cache")
should_bundle_compiled = Predicate(f"{_AOT}.graph_compile:should_bundle_autograd_cache")
plain_tensor_meta = AnyClass(f"{_AOT}.schemas:PlainTensorMeta")
#: Fields of an entry with their own section in a frame, or with code.
ENTRY_BULK = Fields(
    _RESULT,
    """compiled_fw compiled_bw aot_joint_graph_str aot_forward_graph_str aot_backward_graph_str
    runtime_metadata dispatch_wrappers forward_time_taken_ns backward_time_taken_ns guards_expr
    serialized_bw_module min_cut_info_str""",
    added={"min_cut_info_str": (2, 13)},
)
#: A description includes the attributes of objects from these modules.
DESCRIBED = f"{_AOT}."
#: Properties that a description includes like attributes.
COMPUTED = Fields(f"{_AOT}.schemas:InputAliasInfo", "mutation_type").names
deserialize_backward = AnyFunction(f"{_AOT}.aot_autograd_result:SerializedGraphModule.deserialize")
keeps_graph = Predicate("torch._C._autograd:_get_current_graph_task_keep_graph")
without_fakes = AnyFunction(f"{_FAKE}:unset_fake_temporarily")
answer_first_call = AnyFunction(f"{_AOT}.runtime_wrappers:FakifiedOutWrapper.post_compile")

# -- functions that compiled autograd creates during a trace

COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_MAKES_PROLOGUE = "AutogradCompilerInstance.proxy_call_aot_backward"

autograd_node = AnyClass(f"{COMPILED_AUTOGRAD}:Op")
(_PROLOGUE,) = Fields(f"{COMPILED_AUTOGRAD}:{_MAKES_PROLOGUE}", "call_aot_bwd_prologue")
(PROLOGUE_CELL,) = Fields(f"{COMPILED_AUTOGRAD}:{_MAKES_PROLOGUE}", "bw_prologue_fn", since=(2, 13))
#: The prologue that compiled autograd makes for the backward pass of a compiled graph.
PROLOGUE = f"{_MAKES_PROLOGUE}.<locals>.{_PROLOGUE}"
#: Globals of the code that AOTAutograd generates for a prologue: a function that it calls, its
#: data, and values in error messages.
PROLOGUE_CALLS, PROLOGUE_TANGENTS, *PROLOGUE_MESSAGES = Fields(
    f"{_AOT}.runtime_wrappers:_codegen_backward_prologue",
    "_process_tangent_ _tangent_metas_ _tangent_descs_ _compile_id_ _stack_traces_",
    since=(2, 13),
)

# -- keys and entries of FX graphs

#: The attribute of a loaded graph with the function that runs its code.
(CALLABLE,) = Fields(_GRAPH, "current_callable")
fx_prepare_key = AnyFunction(f"{_FX}.prepare_key")
fx_check_cacheable = AnyFunction(f"{_FX}._check_can_cache")
fx_lookup = AnyFunction(f"{_FX}._lookup_graph")
fx_candidates = AnyFunction(f"{_FX}.iterate_over_candidates")
fx_save = AnyFunction(f"{_FX}._save_graph")
fx_write_to_local_cache = AnyFunction(f"{_FX}._write_to_local_cache")
fx_remote_cache = AnyFunction(f"{_FX}.get_remote_cache")
should_use_remote_fx_here = Predicate(f"{_COMPILE}:should_use_remote_fx_graph_cache")
should_use_remote_fx_cache = Predicate("torch._inductor.utils:should_use_remote_fx_graph_cache")
fx_key_details = AnyClass(_FX_DETAILS)
details_of = AnyFunction(_FX_DETAILS)
fx_pickler = AnyFunction(_FX_PICKLER)
fx_get_key = Internal[Callable[[KeyPickler, object], str]](f"{_FX_PICKLER}.get_key", since=(2, 13))
fx_get_hash = Internal[Callable[[KeyPickler, object], str]](f"{_FX_PICKLER}.get_hash")
fx_debug_lines = AnyFunction(f"{_FX_PICKLER}.debug_lines", feature=KEY_LOGS)
#: Details of an FX graph that are not settings.
GRAPHS_DETAILS = Fields(_FX_DETAILS, "gm example_inputs fx_kwargs")
#: The index of the current accelerator; absent without one.
CURRENT_DEVICE = "default_cuda_device_index"
#: The type of devices between which entries can move; AMD's devices have this type too.
MOVABLE = "cuda"
FX_PREFIX = "f"
#: The function that a key's pickler uses to replace an object; it returns its argument.
same = Internal[Callable[[object], object]](f"{_CODE}:_ident")
tensor_metadata = AnyFunction(f"{_CODE}:extract_tensor_metadata_for_cache_key")
is_frozen_param = Predicate("torch._inductor.freezing_utils:is_frozen_param")
has_frozen_params = Predicate("torch._inductor.freezing_utils:has_frozen_params")
can_inline_constant = Predicate("torch._inductor.graph:GraphLowering.can_inline_constant")
bisection_enabled = Flag("torch._inductor.compiler_bisector:CompilerBisector.bisection_enabled")
backward_state = AnyClass("torch.fx.experimental._backward_state:BackwardState")

# -- operators and their registrations

disable_from_compile = AnyFunction("torch._compile:_disable_dynamo")
qualified_name = Internal[Callable[[object], str]]("torch.fx.node:_get_qualified_name")
is_from_torch = Predicate("torch.fx.graph:_is_from_torch")
# The namespace in which torch._VF finds its functions, unless they were set on torch._VF.
variable_functions = AnyClass("torch._C:_VariableFunctionsClass")
operator = AnyClass("torch._ops:OpOverload")
operator_packet = AnyClass("torch._ops:OpOverloadPacket")
higher_order_operator = AnyClass("torch._ops:HigherOrderOperator")
operator_namespace = AnyClass("torch._ops:_OpNamespace")
higher_order_operators = Internal[dict[str, object]]("torch._ops:_higher_order_ops")
#: Whether graphs with a higher-order operator may be cached; torch's checks read it.
operator_cacheable = Predicate("torch._ops:HigherOrderOperator.cacheable")
#: The operator that Dynamo uses for a custom ``autograd.Function``.
custom_function = AnyObject("torch._functorch.autograd_function:autograd_function_apply")
#: Whether graphs contain objects of a user's class directly.
is_opaque_type = Predicate("torch._library.opaque_object:is_opaque_type")
ordered_set = Internal[type[Collection[object]]]("torch.utils._ordered_set:OrderedSet")
Fields("torch._ops:OpOverload", "py_kernels python_key_table functorch_table _schema tags")
Fields("torch._ops:OpOverloadPacket", "overloads")

# The dispatcher's format for the key and source file of a kernel, of an operator and of its own.
REGISTERED_AT = re.compile(r"^(\S+): registered at (.+?):\d+ ", re.MULTILINE)
DEFINED_AT = re.compile(r"^debug: registered at (.+?):\d+$", re.MULTILINE)


def _says_where(dump: Callable[[str], str]) -> bool:
    text = dump("aten::relu")
    return REGISTERED_AT.search(text) is not None and DEFINED_AT.search(text) is not None


dispatch_dump = Internal[Callable[[str], str]]("torch._C:_dispatch_dump", works=_says_where)
custom_operators = Internal[Mapping[str, Any]]("torch._library.custom_ops:OPDEFS")
fake_registry = Internal[Mapping[str, Any]]("torch._library.simple_registry:singleton._data")
register_kernel = AnyFunction("torch.library:Library.impl")
#: Operators and keys with a Python kernel, such as ``aten/silu/AutogradCPU``.
python_kernels = Internal[set[str]]("torch.library:_impls")
Fields(
    "torch._library.custom_ops:CustomOpDef",
    """_init_fn _opoverload _torch_dispatch_fns _abstract_fn _backward_fn _setup_context_fn _vmap_fn
    _autocast_dtype""",
    added={"_autocast_dtype": (2, 13)},
)
Fields("torch._library.simple_registry:SimpleOperatorEntry", "fake_impl torch_dispatch_rules")
Fields("torch._library.fake_impl:FakeImplHolder", "kernel")
Fields("torch._library.utils:Kernel", "func")
#: Returns a number that changes with every change of a dictionary; Dynamo's guards use it.
dict_version = Internal[Callable[[dict[Any, Any]], int]]("torch._C._dynamo.guards:dict_version")

# -- custom passes, patterns, backends and decompositions

_PASSES = "torch._inductor.custom_graph_pass"
PATTERN_MATCHER = "torch._inductor.pattern_matcher"
BACKENDS = "torch._inductor.codegen.common"

custom_graph_pass = AnyClass(f"{_PASSES}:CustomGraphPass")
custom_partitioner = AnyClass(f"{_PASSES}:CustomPartitionerFn")
custom_scheduler_pass = AnyClass(f"{_PASSES}:CustomSchedulerPass", since=(2, 13))
custom_solver = AnyClass(f"{_PASSES}:CustomKnapsackSolver")
custom_estimator = AnyClass(f"{_PASSES}:CustomRuntimeEstimator")
pattern_pass = AnyClass(f"{PATTERN_MATCHER}:PatternMatcherPass")
pass_package = Internal[ModuleType]("torch._inductor.fx_passes")
Fields(f"{PATTERN_MATCHER}:PatternEntry", "pattern extra_check")
custom_backend_passes = Internal[Mapping[str, object]](f"{BACKENDS}:custom_backend_passes")
device_codegens = Internal[Mapping[str, object]](f"{BACKENDS}:device_codegens")
device_overrides = Internal[Mapping[str, object]](f"{BACKENDS}:device_op_overrides_dict")
init_backends = AnyFunction(f"{_CODE}:init_backend_registration")
choices = AnyObject("torch._inductor.virtualized:_choices")
virtual = AnyObject("torch._inductor.virtualized:threadlocal")
#: Whether AOTInductor compiles; torch then uses none of its caches of graphs.
compiles_ahead = Flag("torch._inductor.virtualized:V.aot_compilation")
default_handler = AnyClass("torch._inductor.ops_handler:DefaultHandler")
#: Calls of these stay in a graph even if their results are unused.
side_effectful = Internal[set[object]]("torch.fx.node:_side_effectful_functions")
#: Predicates on operators with rules for fake tensors; the first match is used.
fake_rules = AnyObject("torch._subclasses.fake_impls:op_implementations_checks")
fake_mode = AnyClass(f"{_FAKE}:FakeTensorMode")
meta_table = Internal[Mapping[object, object]]("torch._decomp:meta_table")
#: The holder of decompositions that a user's backend has passed.
given_decompositions = AnyClass(f"{_COMPILE}:_ConstantDecompTable", since=(2, 13))
decompositions = Internal[Mapping[object, object]](f"{DECOMPOSITIONS}:decompositions")
decompositions_with_random = AnyObject(f"{DECOMPOSITIONS}:fast_random_decomps")
decomposition_table = AnyFunction(f"{DECOMPOSITIONS}:select_decomp_table")
random_decompositions = Internal[Mapping[object, object]](f"{DECOMPOSITIONS}:extra_random_decomps")
extern_choice = AnyClass("torch._inductor.select_algorithm:ExternKernelChoice")

# -- Inductor: how it is called, its directories and kernels

compile_fx = AnyFunction(f"{_COMPILE}:compile_fx")
compile_fx_inner = AnyFunction(f"{_COMPILE}:_compile_fx_inner")
#: The function around it, which sets up a compile.
compile_fx_graph = AnyFunction(f"{_COMPILE}:compile_fx_inner")
inductor_state = AnyObject("torch._inductor.virtualized:V")
inductor_backend = AnyFunction("torch:_TorchCompileInductorWrapper", feature=BACKEND)
cpp_wrapper_options = AnyFunction(f"{_COMPILE}:get_cpp_wrapper_config")
#: Creates and returns the directory of torch's own caches, and sets its environment variable.
cache_dir = AnyFunction("torch._inductor.runtime.cache_dir_utils:cache_dir")
#: Makes torch forget modules that it loaded from there, and their paths.
clear_caches = AnyFunction("torch._inductor.utils:clear_caches", feature=LOCKDOWN)
populate_caches = AnyFunction(
    "torch.compiler._cache:CacheArtifactManager.populate_caches", feature=LOCKDOWN
)
#: Environment variables for the directories of compiled code.
DIRECTORIES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

compiled_graph = AnyClass(_GRAPH)
#: The attribute that its ``__del__`` reads.
RUNNER = "compiled_fn_runner"
load_library = AnyFunction(f"{_CODE}:CppCodeCache.load_async")
load_module = AnyFunction(f"{_CODE}:PyCodeCache.load_by_key_path")
run_module = Internal[Function[ModuleType]](f"{_CODE}:_reload_python_module")
#: Runs the Python code of an unpickled graph; writes its file if it is missing.
rebuild_module = Internal[Function[str]](f"{_GRAPH}.after_deserialization")
path_of_module = Internal[Callable[[str, str], tuple[str, str, str]]](f"{_CODE}:get_path")
#: The arguments for compiling or loading a kernel that identify it.
KERNEL_ARGUMENTS = Fields(
    f"{_CODE}:CppCodeCache.load_async", "main_code optimized_code device_type extra_flags"
)

# -- Triton

#: Writes the kernels of an entry to Triton's directory, and loads some of them from there.
emit_triton_bundle = AnyFunction(f"{_BUNDLER}.read_and_emit")
collect_triton_bundle = AnyFunction(f"{_BUNDLER}.collect")
triton_directory = AnyFunction("torch._inductor.runtime.runtime_utils:triton_cache_dir")
triton_file_name = AnyFunction("torch._inductor.runtime.runtime_utils:triton_hash_to_path_key")
#: Stores the fastest configuration of a kernel in a file beside its source.
autotune_cache = AnyClass("torch._inductor.runtime.autotune_cache:AutotuneCache")
LAUNCHED, AUTOTUNERS = Fields(_BUNDLER, "_winners _static_autotuners", added={"_winners": (2, 12)})
#: The kernels that a compiled graph contained, or that were compiled for it.
(TRITON_BUNDLE,) = Fields(_GRAPH, "_triton_bundle")
_TUNER = "torch._inductor.runtime.triton_heuristics:CachingAutotuner"
#: Attributes of a loaded autotuner that cannot be pickled.
LAUNCHERS, RELOAD = Fields(_TUNER, "launchers _reload_kernel")
(ON_DEVICE,) = Fields(
    "torch._inductor.runtime.static_triton_launcher:StaticallyLaunchedTritonKernel", "function"
)
#: Attributes of Triton's function that depend on the process or its source file, if it has them.
BINDERS, FILE = "device_caches", "file_name"

# -- the current compile, sizes, and guards on inputs

current_tracing_context = AnyFunction("torch._guards:TracingContext.try_get")
tracing = AnyFunction("torch._guards:tracing")
tracing_context = AnyFunction("torch._guards:TracingContext")
fake_tensor: Internal[type[Tensor]] = Internal(f"{_FAKE}:FakeTensor")
fake_mode = AnyClass(f"{_FAKE}:FakeTensorMode")
#: What a fake mode counts and enters while it traces; its other attributes are its options.
STATE_OF_FAKE_MODE = Fields(
    f"{_FAKE}:FakeTensorMode", "enter_stack epoch in_kernel_invocation nt_tensor_id_counter"
).names
shape_env = AnyFunction(f"{_SHAPES}:ShapeEnv")
#: Writes the guards of an entry.
guards_expression = Internal[Function["str | None"]](
    f"{_SHAPES}:ShapeEnv.produce_guards_expression"
)
source = AnyClass("torch._guards:Source")
device_mesh = AnyClass("torch.distributed.device_mesh:DeviceMesh")
#: An input object of a graph as tracing sees it, and the real object.
script_object = AnyClass("torch._library.fake_class_registry:FakeScriptObject")
(REAL_OBJECT,) = Fields("torch._library.fake_class_registry:FakeScriptObject.__init__", "real_obj")
is_wrapper_subclass = Predicate("torch.utils._python_dispatch:is_traceable_wrapper_subclass")
without_modes = AnyFunction("torch.utils._python_dispatch:_disable_current_modes")
unbacked_symbols = AnyFunction(f"{_SHAPES}:free_unbacked_symbols")
expression_printer = AnyClass(f"{_SHAPES}:SymExprPrinter")
#: Functions in guards on sizes, by their printed names.
guard_functions = Internal[dict[str, object]](f"{_SHAPES}:SYMPY_INTERP")
duplicate_inputs = AnyClass("torch._guards:DuplicateInputs")
storage_overlap = AnyClass("torch._guards:StorageOverlap")
overlapping = AnyFunction("torch._C._dynamo.guards:compute_overlapping_tensors")
Fields("torch._guards:TracingContext", "fakify_first_call fw_metadata guards_context")
#: The graph that is being compiled, as in ``["3_backward"]``: the number is that of AOTAutograd.
(GRAPH_NAME,) = Fields("torch._guards:TracingContext", "aot_graph_name")
Fields(
    f"{_SHAPES}:ShapeEnv",
    """axioms backed_var_to_val deferred_runtime_asserts divisible get_nontrivial_guards guards
    prefer_deferred_runtime_asserts_over_guards replace replacements simplify size_like
    suppress_guards unbacked_renamings var_to_range var_to_sources""",
)
#: The key for the unbacked symbols that a node introduces, in its metadata.
NEW_SYMBOLS = "unbacked_bindings"

# -- Dynamo

compile_frame = AnyFunction("torch._dynamo.convert_frame:_compile")
aot_module = AnyFunction("torch._dynamo.backends.common:aot_module_simplified")
disable_dynamo = Internal[Function[Function[object]]]("torch._dynamo:disable")
#: Drops what Dynamo has compiled for a code object; and the frame that it traces now.
reset_code = AnyFunction("torch._C._dynamo.eval_frame:reset_code")
_TRANSLATION = "torch._dynamo.symbolic_convert"
translating = AnyObject(f"{_TRANSLATION}:tls")
(TRANSLATOR,) = Fields(f"{_TRANSLATION}:InstructionTranslator.current_tx", "current_tx")
#: How Dynamo treats the frames of a code object, and those of the functions that it calls.
set_strategy = AnyFunction("torch._C._dynamo.eval_frame:set_code_exec_strategy")
frame_strategy = AnyClass("torch._C._dynamo.eval_frame:_FrameExecStrategy")
frame_action = AnyObject("torch._C._dynamo.eval_frame:_FrameAction")
#: Directories of code that Dynamo does not trace.
skipped_directories = Internal[list[str]]("torch._dynamo.trace_rules:SKIP_DIRS")
add_skipped = AnyFunction("torch._dynamo.trace_rules:add")
apply_skipped = AnyFunction("torch._dynamo.trace_rules:_recompile_re")
count_calls = Internal[Function[int]]("torch._dynamo.utils:count_calls")
graph_break_reasons = AnyObject("torch._dynamo.utils:graph_break_reasons", feature=WATCHING)
#: A context that is active while Dynamo, or a late backward, compiles.
while_compiling = AnyFunction(
    "torch._dynamo.callback:CompilationCallbackHandler.install_callbacks", feature=WATCHING
)
optimized_module = AnyClass("torch._dynamo.eval_frame:OptimizedModule", feature=WATCHING)
(ORIGINAL_CALLABLE,) = Fields(
    "torch._dynamo.eval_frame:innermost_fn", "_torchdynamo_orig_callable", feature=WATCHING
)
#: torch's remote cache of profiles, if it shares them; or ``None``.
remote_profiles = AnyFunction(f"{_PGO}:get_remote_cache", feature=LOCKDOWN)

# -- traces of compiles

event_log = AnyFunction("torch._dynamo.utils:get_chromium_event_logger", feature=TRACES)
trace_log = Internal[Logger]("torch._logging._internal:trace_log", feature=TRACES)
profiler_runs = Flag("torch.autograd.profiler:_is_profiler_enabled", feature=TRACES)

# -- parts of the compiler that generated code rarely calls; not imported to find them

SELECTION = "torch._inductor.select_algorithm"
PLANNING = "torch._inductor.codegen.memory_planning"
selected_kernels = AnyObject(f"{SELECTION}:extern_kernels", feature=LATE_CODE)
align = AnyFunction(f"{PLANNING}:_align", feature=LATE_CODE)
