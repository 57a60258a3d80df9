"""Is everything as it must be? One verdict for each thing, and a fix where it is not."""

from s3cache.doctor._checks import (
    Check,
    Name,
    Verdict,
    check_compiler,
    check_disk,
    check_local_dir,
    check_settings,
    check_torch,
    check_trust,
)
from s3cache.doctor._examine import check_remote, examine

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
