"""The local tier: what this machine already has, bounded, and what it still has to upload."""

from s3cache.tier._accounts import Usage
from s3cache.tier._tier import LocalTier

__all__ = ["LocalTier", "Usage"]
