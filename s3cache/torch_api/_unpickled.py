"""What pickled entries may name and call: by full name, one a line, sorted within its group.

What is not here is read with care (``artifact/_unpickling.py``): data, and classes of the program,
come back if none of their code has to run for it; anything else is a miss that names it.
A name that a release of torch lacks does no harm.
"""

from __future__ import annotations

from typing import Final

__all__ = ["NAMES"]

_PYTHON: Final = """
_codecs.encode
_io.BytesIO
_io.StringIO
_operator.getitem
_operator.or_
array.array
builtins.Ellipsis
builtins.NotImplemented
builtins.bool
builtins.bytearray
builtins.bytes
builtins.complex
builtins.dict
builtins.float
builtins.frozenset
builtins.int
builtins.list
builtins.object
builtins.range
builtins.set
builtins.slice
builtins.str
builtins.tuple
builtins.type
collections.ChainMap
collections.Counter
collections.OrderedDict
collections.UserDict
collections.UserList
collections.UserString
collections.defaultdict
collections.deque
dataclasses._MISSING_TYPE
datetime.date
datetime.datetime
datetime.time
datetime.timedelta
datetime.timezone
decimal.Decimal
enum.Enum
enum.Flag
enum.IntEnum
enum.IntFlag
enum.StrEnum
fractions.Fraction
functools.partial
inspect.Parameter
inspect.Signature
inspect._ParameterKind
inspect._empty
ipaddress.IPv4Address
ipaddress.IPv4Interface
ipaddress.IPv4Network
ipaddress.IPv6Address
ipaddress.IPv6Interface
ipaddress.IPv6Network
pathlib.Path
pathlib.PosixPath
pathlib.PurePath
pathlib.PurePosixPath
pathlib.PureWindowsPath
pathlib._local.Path
pathlib._local.PosixPath
pathlib._local.PurePath
pathlib._local.PurePosixPath
pathlib._local.PureWindowsPath
re.RegexFlag
re._compile
types.EllipsisType
types.GenericAlias
types.MappingProxyType
types.NoneType
types.NotImplementedType
types.SimpleNamespace
types.UnionType
typing.Any
typing.Generic
typing.Protocol
typing.TypeVar
uuid.SafeUUID
uuid.UUID
zoneinfo.ZoneInfo
"""

_NUMPY: Final = """
numpy._core.multiarray._reconstruct
numpy._core.multiarray.scalar
numpy._core.numeric._frombuffer
numpy.bool
numpy.bool_
numpy.complex128
numpy.complex64
numpy.core.multiarray._reconstruct
numpy.core.multiarray.scalar
numpy.core.numeric._frombuffer
numpy.dtype
numpy.float16
numpy.float32
numpy.float64
numpy.int16
numpy.int32
numpy.int64
numpy.int8
numpy.ndarray
numpy.uint16
numpy.uint32
numpy.uint64
numpy.uint8
"""

# Leaves of expressions. Other nodes, torch's own too, come back if they are given no text.
_SYMPY: Final = """
sympy.core.numbers.Float
sympy.core.numbers.Half
sympy.core.numbers.Infinity
sympy.core.numbers.Integer
sympy.core.numbers.NaN
sympy.core.numbers.NegativeInfinity
sympy.core.numbers.NegativeOne
sympy.core.numbers.One
sympy.core.numbers.Zero
sympy.core.symbol.Dummy
sympy.core.symbol.Symbol
sympy.logic.boolalg.BooleanFalse
sympy.logic.boolalg.BooleanTrue
torch.utils._sympy.numbers.IntInfinity
torch.utils._sympy.numbers.NegativeIntInfinity
"""

_TORCH: Final = """
torch.Size
torch.SymBool
torch.SymFloat
torch.SymInt
torch.Tensor
torch._C._VariableFunctionsClass
torch._C._functionalization.InverseReturnMode
torch._C._functionalization.select_int_ViewMeta
torch._C._functionalization.t_ViewMeta
torch._dynamo.source.TensorProperty
torch._functorch._aot_autograd.aot_autograd_result.BundledAOTAutogradResult
torch._functorch._aot_autograd.aot_autograd_result.BundledCompiledBackward
torch._functorch._aot_autograd.aot_autograd_result.BundledCompiledForward
torch._functorch._aot_autograd.aot_autograd_result.SerializedGraphModule
torch._functorch._aot_autograd.descriptors.IntermediateBaseAOTOutput
torch._functorch._aot_autograd.descriptors.PlainAOTOutput
torch._functorch._aot_autograd.descriptors.TangentAOTInput
torch._functorch._aot_autograd.functional_utils.MetadataKey
torch._functorch._aot_autograd.functional_utils.ViewMetaSequence
torch._functorch._aot_autograd.runtime_wrappers.AOTDedupeWrapper
torch._functorch._aot_autograd.runtime_wrappers.AOTSyntheticBaseWrapper
torch._functorch._aot_autograd.schemas.CacheableAOTConfig
torch._functorch._aot_autograd.schemas.InputAliasInfo
torch._functorch._aot_autograd.schemas.MemoryFormatMeta
torch._functorch._aot_autograd.schemas.MutationType
torch._functorch._aot_autograd.schemas.OutputAliasInfo
torch._functorch._aot_autograd.schemas.OutputType
torch._functorch._aot_autograd.schemas.PlainTensorMeta
torch._functorch._aot_autograd.schemas.SubclassCreationMeta
torch._functorch._aot_autograd.schemas.SubclassMeta
torch._functorch._aot_autograd.schemas.ViewAndMutationMeta
torch._guards.CompileId
torch._inductor.cudagraph_utils.BoxedDeviceIndex
torch._inductor.decomposition.fast_random_decomps
torch._inductor.decomposition.select_decomp_table
torch._inductor.metrics.CachedMetricsDeltas
torch._inductor.output_code.CompiledFxGraph
torch._inductor.utils.BoxedBool
torch._subclasses.fake_tensor.FakeTensor
torch._subclasses.functional_tensor.FunctionalTensor
torch._utils._rebuild_device_tensor_from_cpu_tensor
torch._utils._rebuild_device_tensor_from_numpy
torch._utils._rebuild_meta_tensor_no_storage
torch._utils._rebuild_nested_tensor
torch._utils._rebuild_parameter
torch._utils._rebuild_parameter_with_state
torch._utils._rebuild_qtensor
torch._utils._rebuild_sparse_tensor
torch._utils._rebuild_tensor
torch._utils._rebuild_tensor_v2
torch._utils._rebuild_tensor_v3
torch._utils._rebuild_wrapper_subclass
torch.device
torch.distributed.device_mesh.DeviceMesh
torch.distributed.tensor.DTensor
torch.distributed.tensor._dtensor_spec.DTensorSpec
torch.distributed.tensor._dtensor_spec.TensorMeta
torch.distributed.tensor.placement_types.Partial
torch.distributed.tensor.placement_types.Replicate
torch.distributed.tensor.placement_types.Shard
torch.distributed.tensor.placement_types._MaskPartial
torch.distributed.tensor.placement_types._StridedShard
torch.fx.experimental.symbolic_shapes.SymIntEqByExpr
torch.fx.graph_module.reduce_graph_module
torch.fx.immutable_collections.immutable_dict
torch.fx.immutable_collections.immutable_list
torch.nested._internal.nested_tensor.NestedTensor
torch.nn.parameter.Buffer
torch.nn.parameter.Parameter
torch.serialization._get_layout
torch.testing._internal.two_tensor.TwoTensor
torch.utils._ordered_set.OrderedSet
"""

# Kernels of Triton, those of users too.
_TRITON: Final = """
torch._inductor.remote_cache.LocalAutotuneCache
torch._inductor.remote_cache.LocalCacheBackend
torch._inductor.remote_cache.RemoteCacheJsonSerde
torch._inductor.runtime.autotune_cache.AutotuneCache
torch._inductor.runtime.coordinate_descent_tuner.CoordescTuner
torch._inductor.runtime.hints.DeviceProperties
torch._inductor.runtime.hints.HeuristicType
torch._inductor.runtime.hints.ReductionHint
torch._inductor.runtime.static_triton_launcher.StaticallyLaunchedCudaKernel
torch._inductor.runtime.triton_heuristics.CachingAutotuner
torch._inductor.runtime.triton_heuristics.InductorConfig
torch._inductor.runtime.triton_heuristics.StaticTritonCompileResult
torch._inductor.runtime.triton_heuristics._ConstRepr
torch._inductor.triton_bundler.StaticallyLaunchedAutotuner
torch._inductor.triton_bundler.TritonBundle
torch._inductor.triton_bundler.TritonKernelArtifact
torch._inductor.triton_bundler.TritonKernelArtifacts
torch.compiler._cache.CacheArtifactRecorder
triton.language.core.constexpr
triton.runtime.jit.JITFunction
triton.runtime.jit.KernelParam
"""

NAMES: Final = frozenset(f"{_PYTHON}{_NUMPY}{_SYMPY}{_TORCH}{_TRITON}".split())
