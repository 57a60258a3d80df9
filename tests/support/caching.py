"""Helpers for tests of tiers and caches: entries, settings that give up quickly, caches."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from s3cache import frame
from s3cache.cache import Cache, Engine
from s3cache.frame import Frame
from s3cache.seam import features
from s3cache.settings import Settings
from s3cache.store import Store

KEY = "ab" * 16
OTHER = "cd" * 16


def entry(key: str = KEY, variant: str = "", payload: bytes = b"payload" * 40) -> Frame:
    return frame.decode(
        frame.encode(
            kind="test", key=key, variant=variant, sections={"code": payload}, codec="none"
        )
    )


def payload(found: Frame) -> bytes:
    return bytes(found.section("code"))


def broken(found: Frame) -> bytes:
    """Return the frame with its last byte changed: the header is valid, a section is not."""
    data = bytearray(found.data)
    data[-1] ^= 1
    return bytes(data)


def existing(**options: Any) -> dict[str, Any]:
    """Return those of the options of features that exist."""
    names = {each.name for each in fields(Settings)}
    return {name: value for name, value in options.items() if name in names}


def settings(local_dir: Path | None, **changes: Any) -> Settings:
    """Return settings that give up quickly; without ``local_dir``, there is no local tier."""
    quick: dict[str, Any] = {
        "lookup_timeout_s": 60,
        "exit_timeout_s": 5,
        "retry_attempts": 1,
        "breaker_failures": 1_000,
        **existing(job_profiles=False),  # as with Cache.open(); tests count requests
    }
    where = {"local": False} if local_dir is None else {"local_dir": str(local_dir)}
    return Settings(**{**quick, **where, **changes})


def open_engine(local_dir: Path | None, store: Store | None, **changes: Any) -> Engine:
    """Open an engine over ``store``. All such engines identify it as the same place."""
    return open_cache(local_dir, store, **changes).engine


def open_cache(local_dir: Path | None, store: Store | None, **changes: Any) -> Cache:
    return Cache(
        settings(local_dir, **changes),
        open_remote=None if store is None else lambda: store,
        identity="place",
        used=features(),
    )
