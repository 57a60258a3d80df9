"""Hints: small objects beside entries, by which people find the entry that is nearest to a key.

Of an entry whose key is made of components there are two, in the store and nowhere else::

    index/v1/<graph>/<likeness>.<key>       by the digest of its graph
    index/v1/<program>/<likeness>.<key>     by what the graph's inputs are called and come from

``<likeness>`` has the first digits of the digests of a few components, so that one listing says
which of many entries is nearest, and one more request reads what its key is made of: whoever asks
why a lookup missed needs a handful of requests, however many entries there are.

No lookup reads a hint. They are signed by nobody, may be forged, and outlive their entry where it
is removed by something else; what they say is shown to people, and said to be unverified.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from s3cache._logs import logger_of
from s3cache.entries import KEY_DIGITS, digest_of
from s3cache.errors import PreconditionError, S3CacheError
from s3cache.frame import Frame, Header
from s3cache.store import Buffer, Store, listing

__all__ = ["NAMES", "Hint", "copy", "find", "names_of", "remove", "write"]

logger = logger_of("storage")

#: What the names of all hints begin with.
NAMES = "index/v1/"

_WRITE_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 20
_MAX_PLAIN_BYTES = 8 << 20
# A page of a listing has a thousand names.
_LISTED_AT_MOST = 8000
_AT_ONCE = 16
_DIGITS = 4
# By what entries of one graph are told apart, without reading any.
_GRAPH = "gm"
_PROGRAM = ("aot_config", "example_inputs")
_LIKENESS = (
    *(_GRAPH, "example_inputs", "aot_config", "inductor_config", "autograd_config"),
    *("torch.version", "machine.isa", "torch.num_threads", "cache_key_tag", "grad_enabled"),
)


@dataclass(frozen=True)
class Hint:
    """What a hint says of an entry; whoever may write to the store may have made it up.

    Attributes:
        key: of the entry.
        created: Unix time.
        components: digest and readable value of each component of the key, by name.
        parts: what they consist of.
    """

    key: str
    created: float
    components: Mapping[str, tuple[str, str]]
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


async def write(store: Store, entry: Frame) -> None:
    """Leave hints for ``entry``, if its key is made of components; whatever fails is no matter."""
    names = names_of(entry.header)
    if not names:
        return
    try:
        data = _encode(entry)
        for name in names:
            await asyncio.wait_for(_create(store, name, data), _WRITE_TIMEOUT_S)
    except (S3CacheError, ValueError, TypeError, RecursionError, asyncio.TimeoutError) as exc:
        logger.debug("no hint for %s: %s", entry.header.key, exc)


def names_of(header: Header) -> list[str]:
    """Where the hints for an entry lie, if there are any."""
    return _names_for(_digests(header.meta.get("components")), header.key)


async def find(store: Store, components: Mapping[str, tuple[str, str]], but: str) -> Hint | None:
    """A hint for the entry nearest to a key of these components, other than ``but``.

    Takes at most 18 requests of a store that lists a thousand names in one, and mostly two.

    Raises:
        StoreError: the store cannot answer.
    """
    digests = {name: digest for name, (digest, _) in components.items()}
    wanted = _likeness(digests)
    for folder in _folders(digests):
        best: tuple[int, str] | None = None
        seen = 0
        async with listing(store, folder) as objects:
            async for info in objects:
                likeness, _, key = info.key.removeprefix(folder).partition(".")
                if key and key != but:
                    best = max(filter(None, (best, (_common(likeness, wanted), info.key))))
                seen += 1
                if seen >= _LISTED_AT_MOST:
                    break
        if best is not None:
            data = await store.get_range(best[1], 0, _MAX_BYTES)
            hint = None if data is None else _decode(best[1].rpartition(".")[2], bytes(data))
            if hint is not None:
                return hint
    return None


async def copy(
    source: Store, target: Store, keys: Collection[str], names: Collection[str] | None = None
) -> int:
    """Have the hints for these keys in ``target`` too; what is no hint, or is there, is left alone.

    Takes a listing of all hints of both, and two requests for each that is copied. Whatever fails
    is no matter.

    Args:
        names: where they may lie: nothing is listed.

    Returns:
        How many were copied.
    """
    if not keys:
        return 0
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> bool:
        async with limit:
            data = await source.get_range(name, 0, _MAX_BYTES)
            if data is None or _decode(name.rpartition(".")[2], bytes(data)) is None:
                return False
            return await _create(target, name, data)

    try:
        if names is None:
            found = await _names(source, keys)
            names = found and {*found}.difference(await _names(target, keys))
        done = await asyncio.gather(*map(one, names), return_exceptions=True)
    except S3CacheError as exc:
        logger.debug("no hints were copied: %s", exc)
        return 0
    for failed in done:
        if isinstance(failed, BaseException):
            logger.debug("a hint was not copied: %s", failed)
    return sum(each is True for each in done)


async def remove(store: Store, keys: Collection[str] | None) -> None:
    """Remove the hints for these keys, all of them for ``None``.

    Raises:
        StoreError: the store refuses, or cannot do it.
    """
    if keys is not None and not keys:
        return
    names = await _names(store, keys)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def delete(name: str) -> None:
        async with limit:
            await store.delete(name)

    for failed in await asyncio.gather(*map(delete, names), return_exceptions=True):
        if failed is not None:
            raise failed


async def _create(store: Store, name: str, data: Buffer) -> bool:
    # It may be there for another variant of that key, or from another machine.
    with contextlib.suppress(PreconditionError):
        await store.put(name, data, mode="create")
        return True
    return False


async def _names(store: Store, keys: Collection[str] | None) -> list[str]:
    """The names of all hints for these keys, of all there are for ``None``."""
    async with listing(store, NAMES) as objects:
        return [
            info.key
            async for info in objects
            if info.key.startswith(NAMES) and (keys is None or info.key.rpartition(".")[2] in keys)
        ]


# -- names


def _digests(components: object) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, pair in components.items() if isinstance(components, Mapping) else ():
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str):
            found[str(name)] = pair[0]
    return found


def _names_for(digests: Mapping[str, str], key: str) -> list[str]:
    return [f"{folder}{_likeness(digests)}.{key}" for folder in _folders(digests)]


def _folders(digests: Mapping[str, str]) -> Iterator[str]:
    """Where hints for an entry lie; the first has those of the same graph."""
    if graph := digests.get(_GRAPH):
        yield f"{NAMES}{graph}/"
        for name in _PROGRAM:
            if program := digests.get(name):
                yield f"{NAMES}{program}/"
                return


def _likeness(digests: Mapping[str, str]) -> str:
    return "".join(digests.get(name, "")[:_DIGITS].rjust(_DIGITS, "0") for name in _LIKENESS)


def _common(one: str, other: str) -> int:
    return sum(a == b for a, b in zip(_digits(one), _digits(other), strict=False))


def _digits(likeness: str) -> Iterable[str]:
    return (likeness[at : at + _DIGITS] for at in range(0, len(likeness), _DIGITS))


# -- contents


def _encode(entry: Frame) -> bytes:
    parts = json.loads(bytes(entry.section("parts"))) if "parts" in entry.names else {}
    content = {
        "created": entry.header.created_ns / 1e9,
        "components": entry.header.meta["components"],
        "parts": parts,
    }
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode())


def _decode(key: str, data: bytes) -> Hint | None:
    """What a hint says, if it is one, and of that key."""
    try:
        content = json.loads(zlib.decompressobj().decompress(data, _MAX_PLAIN_BYTES))
        components = {
            str(name): (str(digest), str(value))
            for name, (digest, value) in content["components"].items()
        }
        parts = {
            str(name): {str(part): str(text) for part, text in texts.items()}
            for name, texts in content["parts"].items()
        }
        created = float(content["created"])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError, zlib.error):
        return None
    digests = {name: digest for name, (digest, _) in components.items()}
    if digest_of(digests) != key[-KEY_DIGITS:]:
        return None
    return Hint(key, created, components, parts)
