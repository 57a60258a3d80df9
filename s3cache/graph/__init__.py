"""May this graph be cached, and under which key: pure, synchronous, in process."""

from s3cache.graph._graph import Component, reads_storage_offsets, storage_offsets
from s3cache.graph._identity import code_fingerprint
from s3cache.graph._key import FIRST_CALL, Key, key_of, settings_digest
from s3cache.graph._origin import ORIGINAL_ATTR
from s3cache.graph._overrides import forget_kernels, record_kernel, take_baseline
from s3cache.graph._results import (
    BypassReason,
    Code,
    Graph,
    GraphBreak,
    Report,
    cached_at,
)
from s3cache.graph._safety import (
    bypass_reasons,
    described_passes,
    extra_cacheable_functions,
    fx_bypass_reasons,
    is_custom_function,
    process_bypass_reasons,
)
from s3cache.graph._torch_details import unpicklable_options
from s3cache.graph._user_code import context_hashes

__all__ = [
    "FIRST_CALL",
    "ORIGINAL_ATTR",
    "BypassReason",
    "Code",
    "Component",
    "Graph",
    "GraphBreak",
    "Key",
    "Report",
    "bypass_reasons",
    "cached_at",
    "code_fingerprint",
    "context_hashes",
    "described_passes",
    "extra_cacheable_functions",
    "forget_kernels",
    "fx_bypass_reasons",
    "is_custom_function",
    "key_of",
    "process_bypass_reasons",
    "reads_storage_offsets",
    "record_kernel",
    "settings_digest",
    "storage_offsets",
    "take_baseline",
    "unpicklable_options",
]
