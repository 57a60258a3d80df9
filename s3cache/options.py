"""The types of all settings, as arguments; ``make docs-settings`` writes this file."""

from __future__ import annotations

import os
from typing import Literal

from s3cache.store import StoreOptions
from s3cache.trust import Signer


class Options(StoreOptions, total=False):
    """The arguments of :meth:`s3cache.Cache.open` besides the URL; see :class:`Settings`.

    ``None`` means not given.
    """

    mode: Literal["read-write", "read-only", "write-only", "off"] | None
    strict: bool | str | None
    recache: bool | str | None
    summary: bool | str | None
    metrics_file: str | os.PathLike[str] | None
    record: bool | str | None
    share_sources: bool | str | None
    trust: Literal["auto", "off", "prefer", "require"] | None
    trusted_keys: str | None
    revoked: str | None
    signing_key: str | os.PathLike[str] | Signer | None
    signing_timeout_s: float | str | None
    audience: str | None
    signature_ttl_s: float | str | None
    local: bool | str | None
    local_dir: str | os.PathLike[str] | None
    local_max_bytes: int | str | None
    local_max_files: int | str | None
    lookup_timeout_s: float | str | None
    on_miss: Literal["compile", "wait", "error"] | None
    download_concurrency: int | str | None
    upload_concurrency: int | str | None
    prefetch_max_bytes: int | str | None
    upload_queue_max_count: int | str | None
    upload_queue_max_bytes: int | str | None
    exit_timeout_s: float | str | None
    retry_attempts: int | str | None
    attempt_timeout_s: float | str | None
    retry_timeout_s: float | str | None
    upload_timeout_s: float | str | None
    breaker_failures: int | str | None
    breaker_reset_s: float | str | None
    recall: Literal["off", "check", "on", "auto"] | None
    recall_canary: int | str | None
    ports: str | None
    job_profiles: bool | str | None
    wait_s: float | str | None
    leases: Literal["auto", "on", "off"] | None
