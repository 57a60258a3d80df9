"""Is everything as it must be? One verdict for each thing, and a fix where it is not."""

from s3cache.doctor._check import Check, Name, Verdict
from s3cache.doctor._examine import examine
from s3cache.doctor._machine import check_disk, check_local_dir
from s3cache.doctor._program import check_compiler, check_torch
from s3cache.doctor._remote import check_remote
from s3cache.doctor._setup import check_settings, check_trust

__all__ = [
    "Check",
    "Name",
    "Verdict",
    "check_compiler",
    "check_disk",
    "check_local_dir",
    "check_remote",
    "check_settings",
    "check_torch",
    "check_trust",
    "examine",
]
