"""Bodies of objects: large ones are read in parallel ranges and written in parallel parts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from s3cache.errors import PermanentError, TransientError
from s3cache.store._base import AcceptSize, Buffer, NotAccepted
from s3cache.store.s3._client import CHUNK_BYTES, S3Body
from s3cache.store.s3._errors import error_status, not_an_s3_answer
from s3cache.store.s3._options import MIN_PART_BYTES, S3Options

__all__ = ["GetRange", "read_range", "read_whole", "require_stored", "write_parts"]

_T = TypeVar("_T")
#: Asks for ``length`` bytes of one object from ``start``; gives botocore's response.
GetRange = Callable[[int, int], Awaitable[Mapping[str, Any]]]

_MAX_PARTS = 10_000
# Enough to fill a connection-limited link, few enough to leave small requests their share.
_PARTS_AT_ONCE = 8
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


# -- reading


async def read_whole(
    get: GetRange, options: S3Options, accept_size: AcceptSize | None
) -> Buffer | NotAccepted:
    """Return the object, of one version, in as many ranges as it takes.

    Raises:
        TransientError: it was overwritten between two ranges, or something is missing.
        PermanentError: it is larger than ``max_object_bytes``.
        Exception: what ``get`` raises.
    """
    part_bytes = options.part_bytes
    try:
        response = await get(0, part_bytes)
    except Exception as error:
        if error_status(error) == 416:  # an empty object has no first byte
            return b""
        raise
    total = _total_bytes(response)
    size = response.get("ContentLength", 0) if total is None else total
    if size > options.max_object_bytes:
        response["Body"].close()
        raise PermanentError(
            f"the object has {size} bytes, more than max_object_bytes="
            f"{options.max_object_bytes}: no entry is that large; delete it"
        )
    if accept_size is not None and not accept_size(size):
        response["Body"].close()
        return NotAccepted(size)
    if total is None:  # the server knows no ranges and sends everything
        return await _read(response, options.max_object_bytes)
    first = await _read(response, part_bytes)
    if len(first) != min(part_bytes, total):
        raise TransientError(f"{len(first)} bytes came, not {min(part_bytes, total)}")
    if len(first) == total:
        return first
    whole = bytearray(total)
    view = memoryview(whole)
    view[:part_bytes] = first
    del first
    etag = response.get("ETag")
    await _all(
        partial(_read_part, get, start, view[start : start + part_bytes], etag)
        for start in range(part_bytes, total, part_bytes)
    )
    return whole


async def read_range(get: GetRange, start: int, length: int) -> Buffer:
    """Return ``length`` bytes from ``start`` in one request, fewer where the object ends."""
    try:
        response = await get(start, length)
    except Exception as error:
        if error_status(error) == 416:
            return b""
        raise
    total = _total_bytes(response)
    if total is None:  # the server knows no ranges and sends everything
        return (await _read(response, start + length, only_that=True))[start:]
    data = await _read(response, length)
    if len(data) != min(length, total - start):
        raise TransientError(f"{len(data)} bytes came, not {min(length, total - start)}")
    return data


async def _read_part(get: GetRange, start: int, into: memoryview, etag: str | None) -> None:
    # The ETag is compared here, not sent as If-Match: Ceph RGW wants it without its quotes.
    try:
        response = await get(start, len(into))
    except Exception as error:
        if error_status(error) == 416:
            raise TransientError("the object was overwritten while it was read") from error
        raise
    body = response["Body"]
    async with body:
        if response.get("ETag") != etag or _total_bytes(response) is None:
            raise TransientError("the object was overwritten while it was read")
        filled = await _fill(into, body)
    if filled != len(into):
        raise TransientError(f"{filled} bytes came, not {len(into)}")


async def _read(response: Mapping[str, Any], limit: int, *, only_that: bool = False) -> Buffer:
    """Return the body; hardly more than ``limit`` bytes are in memory, whatever headers say.

    Args:
        only_that: leave what comes after the limit unread; else it is an error.
    """
    body = response["Body"]
    data = bytearray()
    async with body:  # what this gives is aiohttp's response: without the check of the length
        while not only_that or len(data) < limit:
            chunk = await body.read(CHUNK_BYTES)
            if not chunk:
                return data
            data += chunk
            if len(data) > limit and not only_that:
                body.close()
                raise PermanentError(
                    f"more than {limit} bytes come: this is no entry; check the server"
                )
        body.close()  # the rest is not waited for
    del data[limit:]
    return data


async def _fill(into: memoryview, body: Any) -> int:
    """Read the body to its end; return how many bytes that were."""
    filled = 0
    while chunk := await body.read(CHUNK_BYTES):
        if filled + len(chunk) > len(into):
            raise TransientError(f"more than {len(into)} bytes came")
        into[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return filled


def _total_bytes(response: Mapping[str, Any]) -> int | None:
    """Return the object's size as a ranged answer states it, None if the answer is the whole."""
    stated = response.get("ContentRange")
    if stated is None:
        return None
    match = _CONTENT_RANGE.fullmatch(stated)
    if match is None:
        raise PermanentError(f"Content-Range {stated!r} states no size; check endpoint_url")
    return int(match[3])


# -- writing


async def write_parts(
    client: Any,
    upload: Mapping[str, Any],
    body: memoryview,
    part_bytes: int,
    encryption: Mapping[str, Any],
    condition: Mapping[str, str],
) -> None:
    """Send ``body`` as the parts of an upload that has been begun, and complete it.

    Args:
        upload: key and id of the upload.
        encryption: arguments that each request needs in order to read or write the object.
        condition: on which the upload is completed.
    """
    size = max(part_bytes, MIN_PART_BYTES, -(-len(body) // _MAX_PARTS))
    parts = await _all(
        partial(_write_part, client, upload, number, body[start : start + size], encryption)
        for number, start in enumerate(range(0, len(body), size), 1)
    )
    done = await client.complete_multipart_upload(
        MultipartUpload={"Parts": parts}, **upload, **encryption, **condition
    )
    # S3 answers 200 before it knows, and may put an error into the body, or nothing:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
    # botocore turns the former into an exception.
    if "ETag" not in done:  # Ceph RGW gives an empty one
        raise not_an_s3_answer("does not say that the upload is complete")


async def _write_part(
    client: Any,
    upload: Mapping[str, Any],
    number: int,
    body: memoryview,
    encryption: Mapping[str, Any],
) -> dict[str, Any]:
    done = await client.upload_part(PartNumber=number, Body=S3Body(body), **upload, **encryption)
    require_stored(done)
    return {"PartNumber": number, "ETag": done["ETag"]}


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
