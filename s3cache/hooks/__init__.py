"""The seams at torch's compiler, in the order of its calls, and what turns them on and off.

``_keys`` → ``_lookups`` (``_kernels``) → ``_bundling`` → ``_saves``; ``_session`` puts them in.
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
