"""Every internal of torch that s3cache uses, by name, and the supported releases.

A declaration without a release applies to all from :data:`OLDEST` to :data:`NEWEST`.
``python -m s3cache.torch_api`` checks all declarations against the installed torch.
"""

from __future__ import annotations

import functools
from typing import Final

from _s3cache_process import CODE_CACHES as CODE_CACHES
from _s3cache_process import COMPILER as COMPILER
from _s3cache_process import TRITON as TRITON
from s3cache.torch_api import AnyFunction, Release, installed_release, installed_version
from s3cache.torch_api.compiling import *
from s3cache.torch_api.lookups import *
from s3cache.torch_api.names import *
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

OLDEST: Release = (2, 11)
NEWEST: Release = (2, 15)


def is_supported() -> bool:
    """Return whether the installed torch is new enough; if not, log one warning."""
    if not (is_new_enough := installed_release() >= OLDEST):
        warn_of_release("is not supported", "it compiles without a cache")
    return is_new_enough


@functools.cache
def warn_of_release(what: str, so: str) -> None:
    """Warn once of the installed torch, with the releases that were tested."""
    tried = "{}.{} to {}.{} were tested".format(*OLDEST, *NEWEST)
    hint = pointer("UnsupportedTorchError")
    logger_of().warning("torch %s %s (%s); %s %s", installed_version(), what, tried, so, hint)


def is_untested() -> bool:
    """Return whether the installed torch is newer than any tested release."""
    return installed_release() > NEWEST


# -- names that pickled entries may use and call

# Names by module.
_LISTED: Final = {
    # Python
    "_codecs": "encode",
    "_io": "BytesIO StringIO",
    "_operator": "getitem or_",
    "array": "array",
    "builtins": """
        Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object
        range set slice str tuple type""",
    "collections": "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque",
    "dataclasses": "_MISSING_TYPE",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "enum": "Enum Flag IntEnum IntFlag StrEnum",
    "fractions": "Fraction",
    "functools": "partial",
    "inspect": "Parameter Signature _ParameterKind _empty",
    "ipaddress": "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath",
    "re": "RegexFlag _compile",
    "types": """
        EllipsisType GenericAlias MappingProxyType NoneType NotImplementedType SimpleNamespace
        UnionType""",
    "typing": "Any Generic Protocol TypeVar",
    "uuid": "SafeUUID UUID",
    "zoneinfo": "ZoneInfo",
    # NumPy
    "numpy": """
        bool bool_ complex128 complex64 dtype float16 float32 float64 int16 int32 int64 int8
        ndarray uint16 uint32 uint64 uint8""",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    # sympy: leaves of expressions. Other nodes are allowed if their arguments are not text.
    "sympy.core.numbers": "Float Half Infinity Integer NaN NegativeInfinity NegativeOne One Zero",
    "sympy.core.symbol": "Dummy Symbol",
    "sympy.logic.boolalg": "BooleanFalse BooleanTrue",
    "torch.utils._sympy.numbers": "IntInfinity NegativeIntInfinity",
    # torch
    "torch": "Size SymBool SymFloat SymInt Tensor device",
    "torch._C": "_VariableFunctionsClass",
    "torch._C._functionalization": "InverseReturnMode select_int_ViewMeta t_ViewMeta",
    "torch._dynamo.source": "TensorProperty",
    "torch._functorch._aot_autograd.aot_autograd_result": """
        BundledAOTAutogradResult BundledCompiledBackward BundledCompiledForward
        SerializedGraphModule""",
    "torch._functorch._aot_autograd.descriptors": """
        IntermediateBaseAOTOutput PlainAOTOutput TangentAOTInput""",
    "torch._functorch._aot_autograd.functional_utils": "MetadataKey ViewMetaSequence",
    "torch._functorch._aot_autograd.runtime_wrappers": "AOTDedupeWrapper AOTSyntheticBaseWrapper",
    "torch._functorch._aot_autograd.schemas": """
        CacheableAOTConfig InputAliasInfo MemoryFormatMeta MutationType OutputAliasInfo
        OutputType PlainTensorMeta SubclassCreationMeta SubclassMeta ViewAndMutationMeta""",
    "torch._guards": "CompileId",
    "torch._inductor.cudagraph_utils": "BoxedDeviceIndex",
    "torch._inductor.decomposition": "fast_random_decomps select_decomp_table",
    "torch._inductor.metrics": "CachedMetricsDeltas",
    "torch._inductor.output_code": "CompiledFxGraph",
    "torch._inductor.utils": "BoxedBool",
    "torch._subclasses.fake_tensor": "FakeTensor",
    "torch._subclasses.functional_tensor": "FunctionalTensor",
    "torch._utils": """
        _rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy
        _rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_parameter
        _rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor
        _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_wrapper_subclass""",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed.tensor.placement_types": """
        Partial Replicate Shard _MaskPartial _StridedShard""",
    "torch.fx.experimental.proxy_tensor": "PythonKeyTracer",  # of nested graphs
    "torch.fx.experimental.symbolic_shapes": "SymIntEqByExpr",
    "torch.fx.graph_module": "reduce_graph_module",
    "torch.fx.immutable_collections": "immutable_dict immutable_list",
    "torch.nested._internal.nested_tensor": "NestedTensor",
    "torch.nn.parameter": "Buffer Parameter",
    "torch.serialization": "_get_layout",
    "torch.testing._internal.two_tensor": "TwoTensor",
    "torch.utils._ordered_set": "OrderedSet",
    # Triton kernels, also of users
    "torch._inductor.remote_cache": "LocalAutotuneCache LocalCacheBackend RemoteCacheJsonSerde",
    "torch._inductor.runtime.autotune_cache": "AutotuneCache",
    "torch._inductor.runtime.coordinate_descent_tuner": "CoordescTuner",
    "torch._inductor.runtime.hints": "DeviceProperties HeuristicType ReductionHint",
    "torch._inductor.runtime.static_triton_launcher": "StaticallyLaunchedCudaKernel",
    "torch._inductor.runtime.triton_heuristics": """
        CachingAutotuner InductorConfig StaticTritonCompileResult _ConstRepr""",
    "torch._inductor.triton_bundler": """
        StaticallyLaunchedAutotuner TritonBundle TritonKernelArtifact TritonKernelArtifacts""",
    "torch.compiler._cache": "CacheArtifactRecorder",
    "triton.language.core": "constexpr",
    "triton.runtime.jit": "JITFunction KernelParam",
}
#: Full names that pickled entries may use and call; ``artifact/_artifact.py`` explains others.
#: A name that a release of torch lacks does no harm.
UNPICKLED: Final = frozenset(
    f"{module}.{name}" for module, names in _LISTED.items() for name in names.split()
)
#: The function for the content of a pickled tensor: it unpickles any class.
UNPICKLED_STORAGE = "torch.storage._load_from_bytes"
#: The function for a pickled tensor of a subclass: it calls any function.
UNPICKLED_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
rebuild_subclass = AnyFunction("torch._tensor:_rebuild_from_type_v2")
#: The module with data classes of sources, which guards name: each release adds some.
SOURCES: Final = "torch._dynamo.source"
#: The class of ``torch``'s functions on tensors, and modules of more.
FUNCTIONS: Final = "torch._C._VariableFunctionsClass"
COMPUTING: Final = frozenset(
    f"torch.{module}"
    for module in ("_C._fft", "_C._linalg", "_C._nn", "_C._special", "nn.functional")
)
#: Classes of objects that describe the format of data.
FORMATS: Final = frozenset({"dtype", "layout", "memory_format", "qscheme"})
#: The module of classes of views.
VIEWS: Final = "torch._C._functionalization"
