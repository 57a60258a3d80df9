"""The only code that touches torch's internals: turning the compile cache on and off."""

from s3cache.hooks._check import Report
from s3cache.hooks._session import active, check, disable, enable, enabled, register_cacheable

__all__ = ["Report", "active", "check", "disable", "enable", "enabled", "register_cacheable"]
