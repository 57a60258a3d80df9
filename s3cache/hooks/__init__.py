"""The only code that touches torch's internals: turning the compile cache on and off."""

from s3cache.hooks._session import disable, enable, enabled, register_cacheable

__all__ = ["disable", "enable", "enabled", "register_cacheable"]
