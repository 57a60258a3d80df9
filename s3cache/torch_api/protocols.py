"""What torch's internal objects look like, as far as s3cache uses them.

Which class of torch each one stands for is in ``internals.py``. torch's public classes are used as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from dataclasses import Field
    from traceback import FrameSummary
    from types import CodeType, ModuleType

    from torch import Tensor
    from torch.fx import GraphModule

__all__ = [
    "AOTConfig",
    "AOTResult",
    "AutogradNode",
    "AutotuneCache",
    "BackwardModule",
    "CachingAutotuner",
    "CompileReason",
    "CompiledGraph",
    "CompiledHalf",
    "Config",
    "ConfigEntry",
    "CppLibraries",
    "CudagraphInfo",
    "CustomOperator",
    "CustomPass",
    "DeviceMesh",
    "DispatchRules",
    "EventLog",
    "ExpressionPrinter",
    "FakeImplementation",
    "FakeKernel",
    "FakeMode",
    "FakeRegistration",
    "FirstCallWrapper",
    "Function",
    "FunctorchConfig",
    "GuardsContext",
    "InductorConfig",
    "KeyDetails",
    "KeyPickler",
    "Operator",
    "OperatorPacket",
    "OutputInfo",
    "PatternEntry",
    "PatternPass",
    "PlaceholderInfo",
    "PythonModules",
    "Reducer",
    "RuntimeMetadata",
    "ShapeEnv",
    "ShapeGuard",
    "ShapeState",
    "SplitByDDP",
    "SubclassMeta",
    "TracingContext",
    "Translator",
    "TritonBundle",
    "TritonFile",
    "TritonKernel",
    "ViewSequence",
    "Virtualized",
]

R = TypeVar("R")

#: A function of which nothing is said but what it returns: its parameters differ from release to
#: release and are passed through, or it is the user's. The one place where types end.
Function: TypeAlias = Callable[..., R]  # type: ignore[explicit-any]

#: What a pickler asks about an object: how to reduce it, or ``NotImplemented``.
Reducer: TypeAlias = Callable[[object], object]


# -- keys


class KeyDetails(Protocol):
    """All that torch's own key of a graph depends on; each of its attributes is a component."""

    gm: GraphModule | None
    example_inputs: Sequence[object]


class KeyPickler(Protocol):
    """torch's pickler for keys."""

    fast: bool
    reducer_override: Reducer

    def clear_memo(self) -> object: ...

    def dumps(self, obj: object) -> bytes: ...


class SharedStore(Protocol):
    """``torch.distributed.Store``: keys and values that all processes of a group share."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class AOTConfig(Protocol):
    """How AOTAutograd is to go about one graph."""

    aot_autograd_arg_pos_to_source: list[object] | None
    precompile_backend_id: str | None


# -- entries


class CompiledGraph(Protocol):
    """What Inductor made of one graph: the forward or the backward half of an entry."""

    cache_key: str
    source_code: str
    guards_expr: str | None
    _time_taken_ns: int | None
    _fx_graph_cache_key: str | None
    _fx_graph_cache_debug_lines: list[str] | None


class TritonFile(Protocol):
    """One file of a kernel."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    filename: str
    payload: bytes


class TritonKernel(Protocol):
    """The files of one of Triton's kernels."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    kernel_hash: str
    device: int
    artifacts: Sequence[TritonFile]


class JITFunction(Protocol):
    """A kernel as Triton has it before it is compiled."""

    fn: object
    create_binder: Callable[[], object]


class AutotuneCache(Protocol):
    """Where the best of several configurations of a kernel is remembered."""

    configs_hash: str
    save: Function[None]

    @classmethod
    def create(
        cls, inductor_meta: object, filename: str, configs_hash: str
    ) -> AutotuneCache | None: ...


class CachingAutotuner(Protocol):
    """All configurations of a kernel, compiled."""

    filename: str | None
    kernel_hash: str
    save_cache_hook: object
    inductor_meta: object
    fn: JITFunction
    compile_results: Sequence[CompiledKernel]


class CompiledKernel(Protocol):
    """One configuration of a kernel."""

    kernel: TritonBinary


class TritonBinary(Protocol):
    """What the device runs."""

    hash: str


class StaticKernel(Protocol):
    """A kernel that torch launches without Triton."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    kernel: CachingAutotuner


class TritonBundle(Protocol):
    """All of them that a compiled graph has."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    kernel_artifacts: Sequence[TritonKernel]
    static_autotuners: Sequence[StaticKernel]


class PlaceholderInfo(Protocol):
    """What messages about CUDA graphs say of an input."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    users: Sequence[PlaceholderInfo]


class CudagraphInfo(Protocol):
    """What is kept of a graph for CUDA graphs."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    placeholders: Sequence[PlaceholderInfo]
    stack_traces: Sequence[str | None]
    cudagraph_fail_reasons: Sequence[str]


class CompiledHalf(Protocol):
    """One half of an entry that holds its code."""

    result: object
    post_compile: Function[Function[object]]


class ViewSequence(Protocol):
    """The views that lead from a base to an output."""

    sequence: Sequence[object]


class OutputInfo(Protocol):
    """What a compiled graph does with one of its outputs."""

    view_meta_sequence: ViewSequence | None


class RuntimeMetadata(Protocol):
    """What a compiled graph does to its inputs and outputs."""

    input_info: Sequence[object]
    output_info: Sequence[OutputInfo]
    subclass_inp_meta: Iterable[object] | None
    subclass_fw_graph_out_meta: Iterable[object] | None
    subclass_tangent_meta: Iterable[object] | None
    tokens: Mapping[object, object] | None
    num_forward: int
    is_rng_op_functionalized: bool
    bw_donated_idxs: list[int] | None


class SubclassMeta(Protocol):
    """A tensor subclass among a graph's inputs or outputs, and what it wraps."""

    flat_tensor_start_idx: int
    arg_count: int
    attrs: Mapping[str, object]
    outer_size: object
    outer_stride: object
    original_subclass: object
    original_subclass_type: type | None


class BackwardModule(Protocol):
    """The graph of a backward as it was before Inductor lowered it, to be made when needed.

    Attributes:
        fn, args: what a pickled ``fx.GraphModule`` is made by, and from: its state first.
    """

    fn: Callable[[dict[str, object], str], GraphModule]
    args: tuple[dict[str, object], str]

    def deserialize(self) -> GraphModule: ...


class AOTResult(Protocol):
    """torch's entry for a graph: what is pickled."""

    compiled_fw: CompiledHalf
    compiled_bw: CompiledHalf | None
    runtime_metadata: RuntimeMetadata
    dispatch_wrappers: Sequence[object]
    forward_time_taken_ns: int
    backward_time_taken_ns: int
    guards_expr: str | None
    serialized_bw_module: BackwardModule


# -- while a graph is traced


class DeviceMesh(Protocol):
    """Devices in a grid: which ranks there are along each of its dimensions."""

    def __getstate__(self) -> dict[str, object]: ...


class ShapeExpression(Protocol):
    """Something that is to hold of sizes."""

    free_symbols: Iterable[object]


class ShapeGuard(Protocol):
    """A guard on sizes."""

    expr: ShapeExpression


class ShapeEnv(Protocol):
    """The symbols that sizes of the program that is compiled have."""

    guards: Sequence[ShapeGuard]
    var_to_sources: Mapping[object, Sequence[object]]
    backed_var_to_val: Mapping[object, object]

    def deserialize_symexpr(self, code: str) -> int: ...
    def suppress_guards(self) -> AbstractContextManager[object]: ...
    def evaluate_guards_expression(self, code: str, args: Sequence[object]) -> bool: ...


class EventLog(Protocol):
    """Where torch notes what takes time while it compiles, for traces and its profiler."""

    def get_stack(self) -> list[str]: ...
    def log_event_start(
        self,
        event_name: str,
        time_ns: int,
        metadata: dict[str, object],
        log_pt2_compile_event: bool,
        /,
    ) -> None: ...
    def log_event_end(
        self,
        event_name: str,
        time_ns: int,
        metadata: dict[str, object],
        start_time_ns: int,
        log_pt2_compile_event: bool,
        /,
    ) -> None: ...


class ExpressionPrinter(Protocol):
    """Writes an expression of symbols as text."""

    def doprint(self, expression: object) -> str: ...


class FakeMode(AbstractContextManager[object], Protocol):
    """The mode in which tensors have sizes but no values."""

    shape_env: ShapeEnv

    def from_tensor(self, tensor: Tensor, *, static_shapes: bool) -> Tensor: ...


class SplitByDDP(Protocol):
    """The graphs of one program that DDPOptimizer has compiled so far."""

    curr_bucket: int
    metadata_per_bucket: list[RuntimeMetadata]


class GuardsContext(Protocol):
    """What Dynamo is to check before it calls the code that is compiled now."""

    dynamo_guards: Sized
    aotautograd_guards: list[object]


class TracingContext(Protocol):
    """What torch knows of the compile that is under way on this thread."""

    fake_mode: FakeMode
    guards_context: GuardsContext
    fakify_first_call: bool
    fw_metadata: RuntimeMetadata | None
    output_strides: list[object] | None
    ddp_optimizer_ctx: SplitByDDP | None


class FirstCallWrapper(Protocol):
    """Answers the first call of a compiled graph with fake tensors, where that is asked for."""

    needs_post_compile: bool
    out_metas: Sequence[object]


class ShapeState(Protocol):
    """What Dynamo has seen of one input: a number, or a tensor's sizes and strides."""

    scalar: object
    size: object
    stride: object


class Translator(Protocol):
    """Dynamo at work on one frame."""

    f_code: CodeType
    distributed_state: object


class CompileReason(Protocol):
    """Why Dynamo ended a graph, and where."""

    reason: str
    user_stack: Sequence[FrameSummary]


# -- code caches of Inductor


class CppLibraries(Protocol):
    """A class of C++ libraries that were compiled or loaded."""

    __name__: str

    @classmethod
    def _load_library(cls, path: str, key: str) -> object: ...


class PythonModules(Protocol):
    """The class of Python modules that Inductor generated."""

    modules_no_attr: MutableMapping[str, ModuleType]


# -- code of users that rewrites graphs


class CustomPass(Protocol):
    """A pass, or a partitioner, that says which code it is."""

    def uuid(self) -> object: ...


# -- operators


class OperatorPacket(Protocol):
    """An operator with all its overloads."""

    def overloads(self) -> list[str]: ...


class Operator(Protocol):
    """One overload of an operator."""

    namespace: str
    py_kernels: dict[object, object]
    python_key_table: dict[object, object]
    functorch_table: dict[object, object]
    _schema: object
    tags: Sequence[object]

    def name(self) -> str: ...


class DecompositionTable(Protocol):
    """Decompositions, where torch keeps those that it was given."""

    table: Mapping[object, object]


class MemoizedTable(Protocol):
    """A function that makes a table once."""

    def __call__(self) -> Mapping[object, object]: ...

    def cache_info(self) -> CacheInfo: ...


class CacheInfo(Protocol):
    """How much a function has remembered."""

    currsize: int


class CustomOperator(Protocol):
    """What ``torch.library.custom_op`` made."""

    _init_fn: Function[object]
    _backend_fns: Mapping[object, Function[object]]
    _opoverload: Operator
    _torch_dispatch_fns: Mapping[type, Function[object]]
    _abstract_fn: Function[object] | None
    _backward_fn: Function[object] | None
    _setup_context_fn: Function[object] | None
    _vmap_fn: Function[object] | None


class FakeKernel(Protocol):
    """What runs on fake tensors in place of an operator's kernels."""

    func: Function[object]


class FakeImplementation(Protocol):
    """Where such a kernel is registered."""

    @property
    def kernel(self) -> FakeKernel | None: ...


class DispatchRules(Protocol):
    """What runs on tensor subclasses and in modes in place of an operator's kernels."""

    _data: Mapping[object, Function[object]]


class EffectOfOperator(Protocol):
    """Whether calls of it are kept in order."""

    @property
    def effect(self) -> object: ...


class FakeRegistration(Protocol):
    """What ``torch.library`` keeps for one operator."""

    fake_impl: FakeImplementation
    torch_dispatch_rules: DispatchRules
    effect: EffectOfOperator


class OperatorLibrary(Protocol):
    """What operators are defined and kernels registered through."""

    ns: str
    dispatch_key: str


class AutogradNode(Protocol):
    """A function in graphs of compiled autograd that stands for one kind of node of autograd."""

    __name__: str
    is_custom_function: bool


# -- options


class ConfigEntry(Protocol):
    """One option of a config module."""

    default: object
    alias: str | None


class Config(Protocol):
    """A config module: options are its attributes."""

    __name__: str
    _config: Mapping[str, ConfigEntry]

    def patch(self, **changes: object) -> AbstractContextManager[object]: ...


class PatternPass(Protocol):
    """``PatternMatcherPass``: patterns of graphs, by what stands at their ends."""

    @property
    def patterns(self) -> Mapping[tuple[str, object], Sequence[PatternEntry]]: ...


class PatternEntry(Protocol):
    """One of its patterns, and what becomes of what matches it."""

    pattern: object
    extra_check: object


class Virtualized(Protocol):
    """A variable of Inductor's that each thread has its own value of, under this name."""

    _key: str


class FunctorchConfig(Config, Protocol):
    """``torch._functorch.config``."""

    enable_autograd_cache: bool
    enable_remote_autograd_cache: bool | None
    bundled_autograd_cache: bool
    joint_custom_pass: object
    activation_memory_budget_runtime_estimator: object
    activation_memory_budget_solver: object


class InductorConfig(Config, Protocol):
    """``torch._inductor.config``."""

    fx_graph_cache: bool
    fx_graph_remote_cache: bool | None
    freezing: bool
    cpp_wrapper: bool
    cpu_backend: str
    max_autotune: bool
    max_autotune_gemm: bool
    unsafe_marked_cacheable_functions: Mapping[str, str]
    pre_grad_custom_pass: object
    post_grad_custom_pre_pass: object
    post_grad_custom_post_pass: object
    joint_custom_pre_pass: object
    joint_custom_post_pass: object
    _pre_fusion_custom_pass: object
    _post_fusion_custom_pass: object
    _fuse_ddp_communication_passes: Sequence[object]
    custom_partitioner_fn: object
