"""What one entry of the compile cache holds, its frame, and what its header says of the graph."""

from s3cache.artifact._artifact import (
    CONDITIONS,
    SCHEMA,
    Artifact,
    variant_of,
)
from s3cache.artifact._describe import describe, description, packed, unpacked
from s3cache.artifact._images import check_image, hidden_places, without_places
from s3cache.artifact._metadata import (
    AOTConfig,
    Backward,
    BackwardSignature,
    GraphDescription,
    InputAliasInfo,
    MemoryFormatMeta,
    MutationType,
    OpaqueMeta,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    Source,
    SubclassCreationMeta,
    SubclassMeta,
    TorchName,
    TypeName,
    ViewAndMutationMeta,
    ViewMeta,
    ViewMetaSequence,
)
from s3cache.artifact._plain import to_plain
from s3cache.artifact._profile import Changing, ShapeProfile
from s3cache.artifact._unpickling import UnreadableError, check_readable, unpickled
from s3cache.artifact._values import Thing, Value

__all__ = [
    "CONDITIONS",
    "SCHEMA",
    "AOTConfig",
    "Artifact",
    "Backward",
    "BackwardSignature",
    "Changing",
    "GraphDescription",
    "InputAliasInfo",
    "MemoryFormatMeta",
    "MutationType",
    "OpaqueMeta",
    "OutputAliasInfo",
    "OutputType",
    "PlainTensorMeta",
    "ShapeProfile",
    "Source",
    "SubclassCreationMeta",
    "SubclassMeta",
    "Thing",
    "TorchName",
    "TypeName",
    "UnreadableError",
    "Value",
    "ViewAndMutationMeta",
    "ViewMeta",
    "ViewMetaSequence",
    "check_image",
    "check_readable",
    "describe",
    "description",
    "hidden_places",
    "packed",
    "to_plain",
    "unpacked",
    "unpickled",
    "variant_of",
    "without_places",
]
