"""The functions of torch's compiler that are replaced, and what turns them on and off.

``_session`` installs them. ``_keys`` makes the key of a graph. ``_level`` goes through the entries
under it and saves what is compiled, at both levels of ``_graphs``. ``_conditions`` and ``_kernels``
check and load an entry; ``_compiles`` watches what torch compiles after a miss.
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
