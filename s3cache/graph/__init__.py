"""May this graph be cached, and under which key: pure, synchronous, in process."""

from s3cache.graph._graph import Component as Component
from s3cache.graph._graph import reads_storage_offsets as reads_storage_offsets
from s3cache.graph._graph import storage_offsets as storage_offsets
from s3cache.graph._identity import code_fingerprint as code_fingerprint
from s3cache.graph._key import FIRST_CALL as FIRST_CALL
from s3cache.graph._key import Key as Key
from s3cache.graph._key import key_of as key_of
from s3cache.graph._key import settings_digest as settings_digest
from s3cache.graph._origin import ORIGINAL_ATTR as ORIGINAL_ATTR
from s3cache.graph._overrides import forget_kernels as forget_kernels
from s3cache.graph._overrides import record_kernel as record_kernel
from s3cache.graph._overrides import take_baseline as take_baseline
from s3cache.graph._results import BypassReason as BypassReason
from s3cache.graph._results import Code as Code
from s3cache.graph._results import Graph as Graph
from s3cache.graph._results import GraphBreak as GraphBreak
from s3cache.graph._results import Report as Report
from s3cache.graph._results import cached_at as cached_at
from s3cache.graph._safety import bypass_reasons as bypass_reasons
from s3cache.graph._safety import described_passes as described_passes
from s3cache.graph._safety import extra_cacheable_functions as extra_cacheable_functions
from s3cache.graph._safety import fx_bypass_reasons as fx_bypass_reasons
from s3cache.graph._safety import is_custom_function as is_custom_function
from s3cache.graph._safety import process_bypass_reasons as process_bypass_reasons
from s3cache.graph._torch_details import unpicklable_options as unpicklable_options
from s3cache.graph._user_code import context_hashes as context_hashes
