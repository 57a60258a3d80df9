"""The functions of torch's compiler that are replaced, and what turns them on and off.

``_session`` installs them. ``_keys`` makes the key of a graph, ``_level`` goes through the entries
under it and saves what is compiled: whole graphs in ``_aot_graphs``, FX graphs in ``_fx_graphs``.
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
