"""The two tiers, on disk and in the remote store, and the loop that moves entries between them."""

from s3cache.tier._disk import DiskTier as DiskTier
from s3cache.tier._disk import LocalTier as LocalTier
from s3cache.tier._disk import TierStore as TierStore
from s3cache.tier._disk import namespace_of as namespace_of
from s3cache.tier._disk import open_disk as open_disk
from s3cache.tier._remote import BackgroundLoop as BackgroundLoop
from s3cache.tier._remote import Budget as Budget
from s3cache.tier._remote import Prefetch as Prefetch
from s3cache.tier._remote import PrefetchReport as PrefetchReport
from s3cache.tier._remote import RemoteTier as RemoteTier
from s3cache.tier._remote import background as background
from s3cache.tier._remote import before_exit as before_exit
from s3cache.tier._remote import cancel_all as cancel_all
from s3cache.tier._remote import read_head as read_head
from s3cache.tier._uploads import FlushReport as FlushReport
from s3cache.tier._uploads import Uploads as Uploads
