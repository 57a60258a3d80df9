"""Bodies of objects: large ones are read in parallel ranges and written in parallel parts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from s3cache.errors import PermanentError, TransientError
from s3cache.store._base import AcceptSize, Buffer, NotAccepted
from s3cache.store._s3_client import CHUNK_BYTES
from s3cache.store._s3_errors import not_an_s3_answer
from s3cache.store._s3_options import MIN_PART_BYTES, S3Options

_T = TypeVar("_T")
#: Asks for ``length`` bytes of one object from ``start``; gives botocore's response, or None where
#: the object ends before.
GetRange = Callable[[int, int], Awaitable["Mapping[str, Any] | None"]]

_MAX_PARTS = 10_000
# Enough to fill a connection-limited link, few enough to leave small requests their share.
_PARTS_AT_ONCE = 8
_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


async def read_whole(
    get: GetRange, options: S3Options, accept_size: AcceptSize | None
) -> Buffer | NotAccepted:
    """Return the object, of one version, in as many ranges as it takes.

    Raises:
        TransientError: it was overwritten between two ranges, or something is missing.
        PermanentError: it is larger than ``max_object_bytes``.
        Exception: what ``get`` raises.
    """
    response = await get(0, options.part_bytes)
    if response is None:  # an empty object has no first byte
        return b""
    async with response["Body"]:  # as aiohttp's response, which is closed if it was not read
        total, is_range = _total_bytes(response, options)
        if accept_size is not None and not accept_size(total):
            return NotAccepted(total)
        whole = bytearray(total)
        view = memoryview(whole)
        first = view[: options.part_bytes] if is_range else view
        await _fill(first, response["Body"])
    await _all(
        partial(_read_part, get, start, view[start : start + options.part_bytes], response)
        for start in range(len(first), total, options.part_bytes)
    )
    return whole


async def read_range(get: GetRange, options: S3Options, start: int, length: int) -> Buffer:
    """Return ``length`` bytes from ``start`` in one request, fewer where the object ends."""
    response = await get(start, length)
    if response is None:
        return b""
    async with response["Body"]:
        total, is_range = _total_bytes(response, options)
        data = bytearray(min(length, total - start) if is_range else total)
        await _fill(memoryview(data), response["Body"])
        return data if is_range else data[start : start + length]


async def _read_part(get: GetRange, start: int, into: memoryview, first: Mapping[str, Any]) -> None:
    # The ETag is compared here, not sent as If-Match: Ceph RGW wants it without its quotes.
    response = await get(start, len(into))
    if response is not None:
        async with response["Body"]:
            if response.get("ETag") == first.get("ETag") and "ContentRange" in response:
                return await _fill(into, response["Body"])
    raise TransientError("the object was overwritten while it was read")


async def _fill(into: memoryview, body: Any) -> None:
    filled = 0
    while chunk := await body.read(CHUNK_BYTES):
        if filled + len(chunk) > len(into):
            raise TransientError(f"more than {len(into)} bytes came")
        into[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if filled != len(into):
        raise TransientError(f"{filled} bytes came, not {len(into)}")


def _total_bytes(response: Mapping[str, Any], options: S3Options) -> tuple[int, bool]:
    """Return the object's size, and whether the answer is a range of it: some servers know none."""
    stated = response.get("ContentRange")
    if stated is None:
        size = response.get("ContentLength")
        if size is None:
            raise not_an_s3_answer("states no size")
    else:
        match = _CONTENT_RANGE.fullmatch(stated)
        if match is None:
            raise PermanentError(f"Content-Range {stated!r} states no size; check endpoint_url")
        size = int(match[1])
    if size > options.max_object_bytes:
        raise PermanentError(
            f"the object has {size} bytes, more than max_object_bytes={options.max_object_bytes}: "
            "no entry is that large; delete it, or check the server"
        )
    return size, stated is not None


class S3Body:
    """Bytes as a file for botocore (hashing) and as an async iterable for aiohttp (sending).

    Plain bytes would be copied, with a warning of aiohttp; a memoryview botocore refuses.
    """

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        end = len(self._view) if size < 0 else self._at + size
        chunk = self._view[self._at : end]
        self._at += len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._view), CHUNK_BYTES):
            yield self._view[start : start + CHUNK_BYTES]


async def write_parts(
    client: Any,
    upload: Mapping[str, Any],
    body: memoryview,
    part_bytes: int,
    condition: Mapping[str, str],
) -> None:
    """Send ``body`` as the parts of an upload that has been begun, and complete it.

    ``upload`` is what each request for it takes: its key, its id and the encryption.
    """
    size = max(part_bytes, MIN_PART_BYTES, -(-len(body) // _MAX_PARTS))

    async def write(number: int) -> dict[str, Any]:
        part = body[(number - 1) * size : number * size]
        done = await client.upload_part(PartNumber=number, Body=S3Body(part), **upload)
        require_stored(done)
        return {"PartNumber": number, "ETag": done["ETag"]}

    parts = await _all(partial(write, number) for number in range(1, -(-len(body) // size) + 1))
    done = await client.complete_multipart_upload(
        MultipartUpload={"Parts": parts}, **upload, **condition
    )
    # S3 answers 200 before it knows, and may put an error into the body, or nothing:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
    # botocore turns the former into an exception.
    if "ETag" not in done:  # Ceph RGW gives an empty one
        raise not_an_s3_answer("does not say that the upload is complete")


def require_stored(answer: Mapping[str, Any]) -> None:
    """Raise TransientError unless an S3 server says that an object or a part is stored.

    The answer of a proxy or a portal has no ETag, brings a page along, or another status.
    """
    metadata = answer.get("ResponseMetadata", {})
    # S3's answers may have a type of content, but no content.
    page = metadata.get("HTTPHeaders", {}).get("content-length", "0") != "0"
    if not answer.get("ETag") or page or metadata.get("HTTPStatusCode") not in (200, 201):
        raise not_an_s3_answer("does not say that anything was stored")


async def _all(calls: Iterable[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
    """Return results in order, run a few at a time; a failure or cancellation ends all."""
    limit = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def limited(call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        async with limit:
            return await call()

    tasks = [asyncio.ensure_future(limited(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
