"""May this graph be cached, and under which key: pure, synchronous, in process."""

from s3cache.graph._homes import ORIGINAL
from s3cache.graph._identity import code_fingerprint
from s3cache.graph._kernels import forget_kernels, record_kernel
from s3cache.graph._key import Key, key_of, settings_digest, unpicklable_options, unsafe_code
from s3cache.graph._overrides import take_baseline
from s3cache.graph._passes import context_hashes, described_passes
from s3cache.graph._report import Graph, GraphBreak, Report
from s3cache.graph._safety import (
    Code,
    Unsafe,
    also_safe,
    graph_modules,
    is_custom_function,
    unsafe_half,
    unsafe_parts,
    unsafe_process,
)
from s3cache.graph._stable import Component
from s3cache.graph._surroundings import FIRST_CALL, places, sees_places

__all__ = [
    "FIRST_CALL",
    "ORIGINAL",
    "Code",
    "Component",
    "Graph",
    "GraphBreak",
    "Key",
    "Report",
    "Unsafe",
    "also_safe",
    "code_fingerprint",
    "context_hashes",
    "described_passes",
    "forget_kernels",
    "graph_modules",
    "is_custom_function",
    "key_of",
    "places",
    "record_kernel",
    "sees_places",
    "settings_digest",
    "take_baseline",
    "unpicklable_options",
    "unsafe_code",
    "unsafe_half",
    "unsafe_parts",
    "unsafe_process",
]
