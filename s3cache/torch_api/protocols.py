"""Types of torch's internal objects, as far as more than one function of s3cache uses them.

The modules beside this one say which class of torch each protocol stands for. torch's public
classes are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from dataclasses import Field

    from torch.fx import GraphModule

R = TypeVar("R")

#: A function of which only the result is typed: its parameters differ from release to release and
#: are passed through, or it is the user's.
Function: TypeAlias = Callable[..., R]

#: What a pickler asks about an object: how to reduce it, or ``NotImplemented``.
Reducer: TypeAlias = Callable[[object], object]

# Objects that one hook uses, which says what for.
CppLibraries: TypeAlias = Any
CudagraphInfo: TypeAlias = Any
DeviceMesh: TypeAlias = Any
FirstCallWrapper: TypeAlias = Any
PlaceholderInfo: TypeAlias = Any
PythonModules: TypeAlias = Any
Translator: TypeAlias = Any
TritonBundle: TypeAlias = Any


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


class AOTConfig(Protocol):
    """How AOTAutograd is to go about one graph."""

    aot_autograd_arg_pos_to_source: list[object] | None
    precompile_backend_id: str | None


class CompiledGraph(Protocol):
    """What Inductor made of one graph: the forward or the backward of an entry."""

    cache_key: str
    source_code: str
    guards_expr: str | None
    _time_taken_ns: int | None
    _fx_graph_cache_key: str | None
    _fx_graph_cache_debug_lines: list[str] | None


class RuntimeMetadata(Protocol):
    """What a compiled graph does to its inputs and outputs."""

    input_info: Sequence[object]
    output_info: Sequence[object]
    subclass_inp_meta: Iterable[object] | None
    subclass_fw_graph_out_meta: Iterable[object] | None
    tokens: Mapping[object, object] | None
    num_forward: int
    is_rng_op_functionalized: bool
    bw_donated_idxs: list[int] | None


class BackwardModule(Protocol):
    """The graph of a backward as it was before Inductor lowered it, to be made when needed.

    A pickled ``fx.GraphModule``: ``fn`` makes it from ``args``, of which the first is its state.
    """

    fn: Callable[[dict[str, object], str], GraphModule]
    args: tuple[dict[str, object], str]

    def deserialize(self) -> GraphModule: ...


class AOTResult(Protocol):
    """torch's entry for a graph: what is pickled."""

    compiled_fw: Any
    compiled_bw: Any
    runtime_metadata: RuntimeMetadata
    dispatch_wrappers: Sequence[object]
    forward_time_taken_ns: int
    backward_time_taken_ns: int
    guards_expr: str | None
    serialized_bw_module: BackwardModule


class TritonFile(Protocol):
    """One file of a kernel."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    filename: str
    payload: bytes


class CachingAutotuner(Protocol):
    """All configurations of a kernel, compiled."""

    filename: str | None
    kernel_hash: str
    save_cache_hook: object
    inductor_meta: object
    fn: Any
    compile_results: Sequence[Any]


class TracingContext(Protocol):
    """What torch knows of the compile that is under way on this thread."""

    fake_mode: Any
    guards_context: Any
    fakify_first_call: bool
    fw_metadata: RuntimeMetadata | None
    output_strides: list[object] | None
    ddp_optimizer_ctx: Any


class ShapeState(Protocol):
    """What Dynamo has seen of one input: a number, or a tensor's sizes and strides."""

    scalar: object
    size: object
    stride: object


class Operator(Protocol):
    """One overload of an operator."""

    namespace: str
    py_kernels: dict[object, object]
    python_key_table: dict[object, object]
    functorch_table: dict[object, object]
    _schema: object
    tags: Sequence[object]

    def name(self) -> str: ...


class CustomPass(Protocol):
    """A pass, or a partitioner, that says which code it is."""

    def uuid(self) -> object: ...


class DecompositionTable(Protocol):
    """Decompositions, where torch keeps those that it was given."""

    table: Mapping[object, object]


class Config(Protocol):
    """A config module: options are its attributes."""

    __name__: str
    _config: Mapping[str, Any]

    def patch(self, **changes: object) -> AbstractContextManager[object]: ...
