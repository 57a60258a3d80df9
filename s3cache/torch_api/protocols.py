"""Names for torch's internal types in signatures. Its public classes are used directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")

#: A function with only its result typed: its parameters differ between releases and are passed
#: through, or it is the user's.
Function: TypeAlias = Callable[..., R]

#: A pickler's function that reduces an object, or returns ``NotImplemented``.
Reducer: TypeAlias = Callable[[object], object]

# Objects: mypy does not know their attributes, which differ between releases.
#: AOTAutograd's configuration for one graph.
AOTConfig: TypeAlias = Any
#: The arguments from which torch makes the callable of a graph with a backward, by name.
AutogradArguments: TypeAlias = dict[str, Any]
#: torch's entry for a graph, which is pickled.
AOTResult: TypeAlias = Any
#: A pickled ``fx.GraphModule``: the graph of a backward before Inductor lowered it.
BackwardModule: TypeAlias = Any
#: All configurations of a kernel, compiled.
CachingAutotuner: TypeAlias = Any
#: The result of Inductor for one graph: the forward or the backward of an entry.
CompiledGraph: TypeAlias = Any
#: A config module: options are its attributes.
Config: TypeAlias = Any
CppLibraries: TypeAlias = Any
CudagraphInfo: TypeAlias = Any
#: A pass or a partitioner that identifies its code by ``uuid``.
CustomPass: TypeAlias = Any
DecompositionTable: TypeAlias = Any
DeviceMesh: TypeAlias = Any
#: An argument, or a part, of the functions of Dynamo that we hook.
DynamoObject: TypeAlias = Any
FirstCallWrapper: TypeAlias = Any
#: The input of torch's own key of a graph; each of its attributes is a component.
KeyDetails: TypeAlias = Any
#: torch's pickler for keys.
KeyPickler: TypeAlias = Any
#: One overload of an operator.
Operator: TypeAlias = Any
PlaceholderInfo: TypeAlias = Any
PythonModules: TypeAlias = Any
#: The description of a compiled graph's effects on inputs and outputs.
RuntimeMetadata: TypeAlias = Any
#: ``torch.distributed.Store``: keys and values that all processes of a group share.
SharedStore: TypeAlias = Any
#: torch's state of the current compile on this thread.
TracingContext: TypeAlias = Any
TritonBundle: TypeAlias = Any
TritonFile: TypeAlias = Any
