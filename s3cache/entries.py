"""Name, verify and publish entries, in a remote store or a local one.

An entry is a frame that is sound and lies where it belongs: :func:`verify` is the one place where
bytes become one, whether they come from the disk, the network or another process.

::

    v1/<spread>/<key>.0           the entry that was saved first under key
    v1/<spread>/<key>.<variant>   every other one; also what this machine saved, in its local tier
    v1/<spread>/<key>._           ... where its variant is ""

Several entries live under one key (the guards of a compiled graph tell them apart), and most keys
have one. So a reader asks for ``.0``, one GET, and lists ``<key>.`` only if that one will not do;
where there is no ``.0`` there is nothing. A writer creates ``.0`` unless it exists, and otherwise
the object named after its variant, a name that no writer of another variant uses: none is lost.

``<spread>`` is one hexadecimal digit of SHA-256(key): it spreads the load over an S3 store's
partitions (https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html) and
files over 16 directories. With more of them, most new files would need a new directory as well.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import threading
from collections.abc import Container, Mapping
from typing import Any, Literal

from s3cache import frame
from s3cache.errors import (
    ConfigError,
    CorruptError,
    PreconditionError,
    TransientError,
    UntrustedError,
)
from s3cache.frame import Frame, Header, TrustCheck
from s3cache.store import Buffer, Store

#: What the names of all entries begin with.
NAMES = "v1/"
#: A key ends in so many hexadecimal digits, those of :func:`digest_of`.
KEY_DIGITS = 64

#: What keys of job profiles, shape profiles and recalled frames begin with; those of graphs do not.
JOB_KEYS, SHAPE_KEYS, RECALL_KEYS = "job-profile-", "p", "r"

_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
_VARIANT = re.compile(r"(?!0$)[a-z0-9][a-z0-9_-]{0,63}|")


def digest_of(components: Mapping[str, str]) -> str:
    """Return the digits that keys of these components (digests by name) end in."""
    lines = [f"{name}\0{components[name]}\n" for name in sorted(components)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_key(key: str) -> str:
    """Return ``key``, or raise :class:`ConfigError`: keys are made to be file and object names."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"cache key {key!r}",
            "is not 1 to 128 of a-z 0-9 _ - that begin with a letter or digit",
            "use a hexadecimal digest",
        )
    return key


def is_legal(key: object, variant: object) -> bool:
    """Return whether these are a key and a variant that an entry may have."""
    if not (isinstance(key, str) and isinstance(variant, str)):
        return False
    return bool(_KEY.fullmatch(key) and _VARIANT.fullmatch(variant))


def check_entry(key: str, entry: Frame) -> None:
    """Raise :class:`ConfigError` unless ``entry`` can be saved under ``key``."""
    check_key(key)
    if entry.header.key != key:
        raise ConfigError(
            f"cache key {key!r}",
            f"is not the key in the frame, {entry.header.key!r}",
            "encode the frame with the key it is saved under",
        )
    if not _VARIANT.fullmatch(entry.header.variant):
        raise ConfigError(
            f"variant {entry.header.variant!r}",
            "is not '' or up to 64 of a-z 0-9 _ - that begin with a letter or digit, other than 0",
            "use a hexadecimal digest of the guards",
        )


@functools.lru_cache(1024)
def name_prefix(key: str) -> str:
    """Return what the names of all entries under ``key`` begin with, and no others do."""
    return f"v1/{hashlib.sha256(key.encode()).hexdigest()[0]}/{key}."


def key_of(name: str) -> str:
    """Return the key of the entries that may lie at ``name``."""
    return name.rpartition("/")[2].partition(".")[0]


def first_name(key: str) -> str:
    """Return the name of the object that holds the entry saved first under ``key``."""
    return name_prefix(key) + "0"


def variant_name(key: str, variant: str) -> str:
    """Return the name of the object that holds nothing but this variant."""
    return name_prefix(key) + (variant or "_")


def names_of(header: Header) -> tuple[str, str]:
    """Return the names of the two objects that may hold the entry."""
    return first_name(header.key), variant_name(header.key, header.variant)


# -- verifying


def verify(name: str, data: Buffer, *, admit: TrustCheck | None = None) -> Frame:
    """Return the entry in ``data``; every section is checked, and that it belongs at ``name``.

    Raises:
        CorruptError: it is damaged, or of another key or variant.
        UntrustedError: ``admit`` refuses it; that is asked before anything of it is parsed.
    """
    entry = frame.decode(data, admit=admit)
    check_place(name, entry.header)
    return entry


def check_place(name: str, header: Header) -> None:
    """Raise :class:`CorruptError` if the entry was moved here, or made under another key.

    Renaming an object in the bucket would make a wrong hit. Entries of compiled graphs say what
    their key is made of, as name to [digest, text]. One that says something else was made for
    another graph, machine or setting, even if it is signed.
    """
    where = f"object {name}"
    if not is_legal(header.key, header.variant) or name not in names_of(header):
        raise CorruptError(where, f"holds key {header.key!r}, variant {header.variant!r}")
    if header.kind not in ("aot", "fx"):
        return
    components: Any = header.meta.get("components")
    try:
        digest = digest_of({label: digest for label, (digest, _) in components.items()})
    except (AttributeError, TypeError, ValueError):
        raise CorruptError(where, "does not say what its key is made of") from None
    if header.key[-KEY_DIGITS:] != digest:
        raise CorruptError(where, f"holds the components of another key, which ends in {digest}")


# -- publishing


class Replaceable:
    """The last digests of entries in the remote that the next one of the same variant replaces."""

    MAX_COUNT = 4096

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._mutex = threading.Lock()
        self._digests: dict[bytes, None] = {}

    def add(self, digest: bytes) -> None:
        """Have the entry with this digest replaced by the next save: it cannot be used."""
        with self._mutex:
            self._digests.pop(digest, None)
            self._digests[digest] = None
            if len(self._digests) > self.MAX_COUNT:
                del self._digests[next(iter(self._digests))]

    def __contains__(self, digest: object) -> bool:
        return self._everything or digest in self._digests


async def publish(
    store: Store, entry: Frame, *, replaceable: Container[bytes], admit: TrustCheck | None = None
) -> bool:
    """Make ``entry`` readable for every process, next to the other variants under its key.

    If the same variant is there already, and sound, it is left alone, unless its digest is among
    the ``replaceable``. What no reader can use is overwritten: damage, found by two equal reads, or
    an entry that belongs elsewhere.

    An entry that ``admit`` refuses is overwritten where it lies under the entry's own name, and
    keeps ``.0``: it keeps no entry that we trust from its readers.

    Returns:
        Whether anything was written, which proves that we may write; all was there if not.

    Raises:
        StoreError: the store could not do it.
    """
    if admit is not None:
        try:
            admit(entry.digest, entry.signatures)
        except UntrustedError:
            admit = None  # what we write is not trusted either
    first, own = names_of(entry.header)
    if not await store.atomic_create():
        # Of several writers that race for the first name there, the last one wins: what the
        # others wrote must also be elsewhere.
        outcomes = [await _put(store, name, entry, replaceable, admit) for name in (own, first)]
        return "written" in outcomes
    outcome = await _put(store, first, entry, replaceable, admit)
    if outcome == "taken":
        outcome = await _put(store, own, entry, replaceable, admit)
    return outcome == "written"


async def _put(
    store: Store,
    name: str,
    entry: Frame,
    replaceable: Container[bytes],
    admit: TrustCheck | None,
) -> Literal["written", "there", "taken"]:
    """Have ``name`` hold the entry's variant, unless another variant has taken it."""
    header = entry.header
    metadata = {
        "s3cache-kind": header.kind,
        "s3cache-variant": header.variant,
        "s3cache-producer": header.producer,
    }
    try:
        await store.put(name, entry.data, mode="create", metadata=metadata)
        return "written"
    except PreconditionError:
        pass
    try:
        present = await _read(store, name, admit)
    except UntrustedError:
        if name == first_name(header.key):
            return "taken"
        present = None
    if present is not None and present.header.variant != header.variant:
        return "taken"
    if present is not None and present.digest not in replaceable:
        return "there"
    await store.put(name, entry.data, metadata=metadata)
    return "written"


async def _read(store: Store, name: str, admit: TrustCheck | None) -> Frame | None:
    """Return the entry at ``name``, or None if it is absent, or damaged in two equal reads.

    Raises:
        TransientError: two reads differ, so the damage is not in what is stored.
    """
    damaged = None
    for _ in range(2):
        data = await store.get(name)
        if data is None or data == damaged:
            return None
        try:
            return await asyncio.to_thread(verify, name, data, admit=admit)
        except CorruptError:
            damaged = data
    raise TransientError("reads of one object differ", op="get", store=store.url, key=name)
