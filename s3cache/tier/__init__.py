"""Where entries are kept: on this machine's disk, and in the remote store behind it."""

from s3cache.tier._disk import DiskTier, TierStore
from s3cache.tier._local import LocalTier
from s3cache.tier._remote import RemoteTier

__all__ = ["DiskTier", "LocalTier", "RemoteTier", "TierStore"]
