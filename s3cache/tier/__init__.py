"""Where entries are kept: on this machine's disk, and in the remote store behind it."""

from s3cache.tier._disk import DiskTier, RestingDisk, TierStore
from s3cache.tier._patient import PatientDiskTier
from s3cache.tier._remote import RemoteTier

__all__ = ["DiskTier", "PatientDiskTier", "RemoteTier", "RestingDisk", "TierStore"]
