"""Name, verify and publish entries, in a remote store or a local one.

An entry is a sound frame under its own name. Only :func:`verify` makes entries from bytes, from the
disk, the network or another process.

::

    v1/<spread>/<key>.0           the entry that was saved first under key
    v1/<spread>/<key>.<variant>   all other entries; also entries of this machine, in its local tier
    v1/<spread>/<key>._           ... with the variant ""

A key may have several entries (they differ in the guards of a compiled graph); most keys have one.
So a reader gets ``.0``, one GET, and lists ``<key>.`` only if that entry does not fit, or to find
out whether ``.0`` alone was removed. A writer creates ``.0`` unless it exists, and otherwise the
object named after its variant. Writers of other variants never use this name, so no entry is lost.

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
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
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

#: The prefix of the names of all entries.
NAMES = "v1/"
#: The number of hexadecimal digits at the end of a key, see :func:`digest_of`.
KEY_DIGITS = 64

# How many characters of a part of a key are kept.
_SHOWN = 100
_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
_VARIANT = re.compile(r"(?!0$)[a-z0-9][a-z0-9_-]{0,63}|")


def digest_of(components: Mapping[str, str]) -> str:
    """Return the last digits of a key with these components (digests by name)."""
    lines = [f"{name}\0{components[name]}\n" for name in sorted(components)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class LabelledKey(str):  # noqa: SLOT000 - a slot would have no default
    """A key made of texts with labels, so that two keys can be compared part by part.

    Attributes:
        components: the digest and the shortened text of each part, by label.
    """

    components: Mapping[str, tuple[str, str]] = MappingProxyType({})

    @property
    def about(self) -> dict[str, list[str]]:
        """The components, for the ``meta`` of an entry."""
        return {label: [*pair] for label, pair in self.components.items()}


def labelled_key(prefix: str, parts: Iterable[tuple[str, object]]) -> LabelledKey:
    """Return the key for labels with values; the text of a value is what counts."""
    texts = {label: str(value) for label, value in parts}
    digests = {
        label: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
        for label, text in texts.items()
    }
    key = LabelledKey(prefix + digest_of(digests))
    key.components = {label: (digests[label], texts[label][:_SHOWN]) for label in texts}
    return key


def check_key(key: str) -> str:
    """Return ``key``; raise ConfigError if it is not a legal file and object name."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"cache key {key!r}",
            "is not 1 to 128 of a-z 0-9 _ - that begin with a letter or digit",
            "use a hexadecimal digest",
        )
    return key


def is_legal(key: object, variant: object) -> bool:
    """Return whether an entry may have this key and variant."""
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
    """Return the prefix of the names of all entries under ``key``, and of no others."""
    return f"v1/{hashlib.sha256(key.encode()).hexdigest()[0]}/{key}."


def key_of(name: str) -> str:
    """Return the key of entries with the name ``name``."""
    return name.rpartition("/")[2].partition(".")[0]


def first_name(key: str) -> str:
    """Return the name of the entry that was saved first under ``key``."""
    return name_prefix(key) + "0"


def variant_name(key: str, variant: str) -> str:
    """Return the name that only this variant has."""
    return name_prefix(key) + (variant or "_")


def names_of(header: Header) -> tuple[str, str]:
    """Return the two possible names of the entry."""
    return first_name(header.key), variant_name(header.key, header.variant)


# -- verifying


def verify(name: str, data: Buffer, *, admit: TrustCheck | None = None) -> Frame:
    """Return the entry in ``data``; check every section, and that it belongs at ``name``.

    Raises CorruptError if it is damaged, or has another key or variant, and UntrustedError if
    ``admit`` refuses it, before it is parsed.
    """
    entry = frame.decode(data, admit=admit)
    check_place(name, entry.header)
    return entry


def check_place(name: str, header: Header) -> None:
    """Raise :class:`CorruptError` if the entry was moved here, or made under another key.

    Renaming an object in the bucket would cause a wrong hit. Entries of compiled graphs contain the
    components of their key, as name to [digest, text]. If they do not match the key, the entry was
    made for another graph, machine or setting, even if it is signed.
    """
    where = f"object {name}"
    if not is_legal(header.key, header.variant) or name not in names_of(header):
        raise CorruptError(where, f"has key {header.key!r}, variant {header.variant!r}")
    if header.kind not in ("aot", "fx"):
        return
    components: Any = header.meta.get("components")
    try:
        digest = digest_of({label: digest for label, (digest, _) in components.items()})
    except (AttributeError, TypeError, ValueError):
        raise CorruptError(where, "lacks the components of its key") from None
    if header.key[-KEY_DIGITS:] != digest:
        raise CorruptError(where, f"has the components of another key, which ends in {digest}")


# -- publishing


class Replaceable:
    """The last digests of entries in the remote that the next entry of their variant replaces."""

    MAX_COUNT = 4096

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._mutex = threading.Lock()
        self._digests: dict[bytes, None] = {}

    def add(self, digest: bytes) -> None:
        """Let the next save replace the entry with this digest, which cannot be used."""
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

    A sound entry of the same variant stays, unless its digest is ``replaceable``. Unusable objects
    are overwritten: damaged ones, confirmed by two equal reads, and misplaced ones. An entry that
    ``admit`` refuses is overwritten under the variant's own name, but stays under ``.0``, where it
    does not hide trusted entries from readers. Return whether an object was written, which proves
    that we may write. Raise StoreError if the store fails.
    """
    if admit is not None:
        try:
            admit(entry.digest, entry.signatures)
        except UntrustedError:
            admit = None  # our own entry is not trusted either
    first, own = names_of(entry.header)
    outcomes = [await _put(store, first, entry, replaceable, admit)]
    is_atomic = await store.atomic_create()
    # Unless creating is atomic, the last of several concurrent writers of the first name wins: the
    # entries of the others must also exist under another name.
    is_unsure = is_atomic is False or (is_atomic is None and "written" in outcomes)
    if is_unsure or "taken" in outcomes:
        outcomes.append(await _put(store, own, entry, replaceable, admit))
    return "written" in outcomes


async def _put(
    store: Store,
    name: str,
    entry: Frame,
    replaceable: Container[bytes],
    admit: TrustCheck | None,
) -> Literal["written", "there", "taken"]:
    """Write the entry at ``name``, unless another variant is there."""
    header = entry.header
    names = ("kind", "variant", "producer")
    metadata = {f"s3cache-{field}": getattr(header, field) for field in names}
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
    """Return the entry at ``name``, or None if it is absent, or damaged in two equal reads."""
    damaged = None
    for _ in range(2):
        data = await store.get(name)
        if data is None or data == damaged:
            return None
        try:
            return await asyncio.to_thread(verify, name, data, admit=admit)
        except CorruptError:
            damaged = data
    # The stored object may be sound.
    raise TransientError("reads of one object differ", op="get", store=store.url, key=name)
