"""Make what a cache begins with from its settings: trust, signer and local tier."""

from __future__ import annotations

import os
import time

from s3cache import frame
from s3cache._problems import Problems
from s3cache.errors import ConfigError, StoreError
from s3cache.frame import Frame
from s3cache.settings import Settings
from s3cache.store import DeadlineExecutor
from s3cache.tier import DiskTier
from s3cache.trust import (
    MACHINE_FILE,
    Policy,
    Signer,
    TimeLimitedSigner,
    check_name,
    pack,
    policy_of,
    sign,
    signing_key_of,
)

__all__ = ["open_disk", "sign_entry", "trust_of"]


def trust_of(settings: Settings) -> tuple[Policy, Signer | None]:
    """Return which entries are trusted, and what signs ours.

    Raises:
        ConfigError: a key or a name cannot be used, or the disk that has them hangs.
    """

    def read() -> tuple[Policy, Signer | None]:
        policy = policy_of(
            None if settings.trust == "auto" else settings.trust,
            settings.trusted_keys or "",
            settings.revoked or "",
            audience=check_name("option audience", settings.audience),
        )
        signer = settings.signing_key
        if signer is None or isinstance(signer, str):
            return policy, signing_key_of(signer or "")
        return policy, TimeLimitedSigner(signer, settings.signing_timeout_s)

    executor = DeadlineExecutor.of(os.path.dirname(MACHINE_FILE))
    try:
        return executor.call(read)
    except StoreError as exc:
        raise ConfigError(
            f"trust file {MACHINE_FILE} or the signing key", str(exc), "mount it again"
        ) from None
    finally:
        executor.release()


def open_disk(settings: Settings, namespace: str, note: bytes) -> DiskTier | None:
    """Open the local tier, or the spare one if the default place cannot be used.

    Returns:
        ``None`` if there is to be none, or, with a warning, if none can be opened.

    Raises:
        ConfigError: the directory was named and is not safe to use; with ``strict``, also the
            default one.
        StoreError: with ``strict``, it cannot be used.
    """
    if not settings.local or settings.mode == "off":
        return None

    def at(place: str) -> DiskTier:
        return DiskTier(
            place,
            namespace=namespace,
            max_bytes=settings.local_max_bytes,
            max_files=settings.local_max_files,
            note=note,
        )

    problems = Problems(strict=settings.strict)
    # The program did not name the default, and is not to blame if another user has it.
    is_default = settings.has_default_local_dir
    problem: Exception | None = None
    for place in filter(None, (settings.local_dir, settings.spare_local_dir)):
        try:
            tier = at(place)
        except (ConfigError, StoreError) as exc:
            if settings.strict or (isinstance(exc, ConfigError) and not is_default):
                raise
            problem = problem or exc
        else:
            if problem is not None:
                problems.warn("local", f"the local tier goes to {place}", problem)
            return tier
    if problem is not None:
        problems.warn("local", "there is no local tier", problem)
    return None


def sign_entry(entry: Frame, signer: Signer, settings: Settings) -> Frame:
    """Return ``entry`` with a signature.

    Raises:
        UntrustedError: the signer did not sign.
    """

    def block(digest: bytes) -> bytes:
        made = sign(
            digest,
            signer,
            audience=settings.audience,
            issued_s=int(time.time()),
            ttl_s=int(settings.signature_ttl_s),
        )
        return pack([made])

    return frame.decode(frame.signed(entry, block))
