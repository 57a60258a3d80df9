"""The store, or the local tier, that settings lead to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3cache.errors import ConfigError
from s3cache.settings import Options, Settings
from s3cache.store import (
    FileLocation,
    MeteredStore,
    RetryingStore,
    RetryPolicy,
    Store,
    open_store,
    parse_url,
    store_identity,
)
from s3cache.tier import PatientDiskTier, TierStore
from s3cache.trust import Policy, check_name, policy_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Place", "open_place", "trust_of"]


@dataclass(frozen=True)
class Place:
    """Where entries lie.

    Attributes:
        store: with retries; nothing is sent before it is used.
        is_local: whether it is this machine's tier.
        settings: those that led here.
        policy: whose entries are used.
    """

    store: Store
    is_local: bool
    settings: Settings
    policy: Policy

    async def to_upload(self) -> set[str]:
        """Names in a local tier that nobody else has yet; none of a remote."""
        return await self.store.recorded() if isinstance(self.store, TierStore) else set()


def trust_of(settings: Settings) -> Policy:
    """Whose entries the settings, and the machine's own file, have us use.

    Raises:
        ConfigError: a key or a name cannot be used.
    """
    return policy_of(
        None if settings.trust == "auto" else settings.trust,
        settings.trusted_keys or "",
        settings.revoked or "",
        audience=check_name("option audience", settings.audience),
    )


def open_place(
    url: str | None = None,
    *,
    in_tier: bool = False,
    of_all: bool = False,
    to_fill: bool = False,
    **options: Unpack[Options],
) -> Place:
    """The remote that ``url`` and the environment name, or this machine's tier of it.

    Args:
        in_tier: the tier, not the remote.
        of_all: of the tier, what is there of all remotes.
        to_fill: a directory that is not there is made, as a job would make it; who only looks
            learns that it is not.

    Raises:
        ConfigError: the settings cannot be used, or name no remote.
        StoreError: the local tier cannot be used.
    """
    settings, of_store = Settings.load(url, **options)
    policy = trust_of(settings)
    if in_tier:
        identity = "" if settings.url is None else store_identity(settings.url, **of_store)
        namespace = "" if of_all else hashlib.sha256(identity.encode()).hexdigest()[:16]
        tier = PatientDiskTier(
            settings.local_dir,
            namespace=namespace,
            max_bytes=settings.local_max_bytes,
            max_files=settings.local_max_files,
        )
        return Place(TierStore(tier), True, settings, policy)
    if settings.url is None:
        raise ConfigError("the cache", "has no URL", "give --url, or set S3CACHE_URL")
    retries = RetryPolicy(
        attempts=settings.retry_attempts,
        total_timeout_s=settings.retry_timeout_s,
        attempt_timeout_s=settings.attempt_timeout_s,
        base_delay_s=0.1,
        max_delay_s=10.0,
    )
    if not to_fill and isinstance(parse_url(settings.url, **of_store), FileLocation):
        of_store["create"] = False
    store = MeteredStore(open_store(settings.url, **of_store))
    return Place(RetryingStore(store, retries), False, settings, policy)
