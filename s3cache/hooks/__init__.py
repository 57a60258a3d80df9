"""The functions of torch's compiler that are replaced, and what turns them on and off.

``_session`` installs them. ``_keys`` makes the key of a graph, and ``_lookups`` goes through the
entries under it. ``_conditions`` and ``_kernels`` check and load one of them. ``_compiles`` follows
what torch compiles after a miss, and saves it. Where ranks exchange data while they compile,
``_ranks`` has them agree on hits.
"""

from s3cache.hooks._session import (
    active,
    check,
    disable,
    enable,
    enable_by_environment,
    enabled,
    register_cacheable,
)

__all__ = [
    "active",
    "check",
    "disable",
    "enable",
    "enable_by_environment",
    "enabled",
    "register_cacheable",
]
