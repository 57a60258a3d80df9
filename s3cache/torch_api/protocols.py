"""Names for torch's internal objects in signatures. Its public classes are used as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")

#: A function of which only the result is typed: its parameters differ from release to release and
#: are passed through, or it is the user's.
Function: TypeAlias = Callable[..., R]

#: What a pickler asks about an object: how to reduce it, or ``NotImplemented``.
Reducer: TypeAlias = Callable[[object], object]

# Objects: mypy knows nothing of their attributes, which differ from release to release.
#: How AOTAutograd is to go about one graph.
AOTConfig: TypeAlias = Any
#: What torch makes the callable of a graph with a backward of, by name of the argument.
AutogradArguments: TypeAlias = dict[str, Any]
#: torch's entry for a graph: what is pickled.
AOTResult: TypeAlias = Any
#: A pickled ``fx.GraphModule``: the graph of a backward before Inductor lowered it.
BackwardModule: TypeAlias = Any
#: All configurations of a kernel, compiled.
CachingAutotuner: TypeAlias = Any
#: What Inductor made of one graph: the forward or the backward of an entry.
CompiledGraph: TypeAlias = Any
#: A config module: options are its attributes.
Config: TypeAlias = Any
CppLibraries: TypeAlias = Any
CudagraphInfo: TypeAlias = Any
#: A pass, or a partitioner, that says by ``uuid`` which code it is.
CustomPass: TypeAlias = Any
DecompositionTable: TypeAlias = Any
DeviceMesh: TypeAlias = Any
#: An argument, or a part, of the functions of Dynamo that hooks are around.
DynamoObject: TypeAlias = Any
FirstCallWrapper: TypeAlias = Any
#: All that torch's own key of a graph depends on; each of its attributes is a component.
KeyDetails: TypeAlias = Any
#: torch's pickler for keys.
KeyPickler: TypeAlias = Any
#: One overload of an operator.
Operator: TypeAlias = Any
PlaceholderInfo: TypeAlias = Any
PythonModules: TypeAlias = Any
#: What a compiled graph does to its inputs and outputs.
RuntimeMetadata: TypeAlias = Any
#: ``torch.distributed.Store``: keys and values that all processes of a group share.
SharedStore: TypeAlias = Any
#: What Dynamo has seen of one input: a number, or a tensor's sizes and strides.
ShapeState: TypeAlias = Any
#: What torch knows of the compile that is under way on this thread.
TracingContext: TypeAlias = Any
Translator: TypeAlias = Any
TritonBundle: TypeAlias = Any
TritonFile: TypeAlias = Any
