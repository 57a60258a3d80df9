"""Objects in a bucket of AWS S3, or of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from s3cache.errors import (
    ClosedError,
    ConfigError,
    PermanentError,
    PreconditionError,
    S3CacheError,
    StoreError,
    TransientError,
)
from s3cache.store._base import Buffer, ObjectInfo, PutMode, check_key, check_range
from s3cache.store._s3_client import CHUNK_BYTES, S3Body, new_client
from s3cache.store._s3_errors import error_status, is_absent, refuses_condition, translate
from s3cache.store._s3_options import MIN_PART_BYTES, S3Options
from s3cache.store._sizes import announce

__all__ = ["PROBE_NAME", "S3Store"]

T = TypeVar("T")

PROBE_NAME = ".s3cache-probe"
_PROBE_TEXT = b"s3cache asks with this object whether the server honours If-None-Match: *\n"

# A store knows no formats: what is in the bytes is their owner's business.
_CONTENT_TYPE = "application/octet-stream"

_MAX_PARTS = 10_000
# Enough to fill a connection-limited link, few enough to leave small requests their share.
_PARTS_AT_ONCE = 8
_READ_AT_ONCE_BYTES = 1 << 20
_ABORT_TIMEOUT_S = 5.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

_Condition = Literal["honoured", "ignored", "assumed"]


class S3Store:
    """A :class:`~s3cache.store._base.Store` in one bucket, under one prefix.

    The client is opened by the first call (about 0.8 s, see :meth:`connect`) and belongs to the
    event loop that made it. Nothing is retried here: wrap the store for that.

    The server verifies the SHA-256 of every uploaded body, as it is part of the signature. A
    download is one version of an object: parts of two versions are never joined.

    The key segment ``.s3cache-probe`` is taken: with ``conditional_create="auto"`` the first
    ``put(mode="create")`` writes a marker of that name under the prefix to learn whether the
    server honours ``If-None-Match``. It is not listed, and cannot be read or written as a key.

    The answer to HEAD has no body, so :meth:`head` gives ``None`` for a missing bucket too.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._url = options.url
        self._prefix = f"{options.prefix}/" if options.prefix else ""
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: asyncio.Task[_Condition] | None = None
        self._condition: _Condition | None = None
        self._swift = False
        self._completes_conditionally = False

        payer = {"RequestPayer": options.request_payer} if options.request_payer else {}
        customer_key: dict[str, Any] = {}
        if options.sse_c_key is not None:
            customer_key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": options.sse_c_key}
        self._common: dict[str, Any] = {"Bucket": options.bucket, **payer}
        self._for_read = {**self._common, **customer_key}
        self._for_write = {**self._for_read, "ContentType": _CONTENT_TYPE}
        if options.sse not in ("none", "C"):
            self._for_write["ServerSideEncryption"] = options.sse
        if options.sse_kms_key_id is not None:
            self._for_write["SSEKMSKeyId"] = options.sse_kms_key_id
        if options.storage_class is not None:
            self._for_write["StorageClass"] = options.storage_class

    def __repr__(self) -> str:
        return f"S3Store({self._url!r})"

    @property
    def url(self) -> str:
        """Bucket, prefix and endpoint; :func:`~s3cache.store._url.parse_url` reads it back."""
        return self._url

    async def connect(self) -> None:
        """Open the client now, so that the first call does not pay for it. Sends nothing to S3.

        Most of that time another thread works; the loop's other tasks go on.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
            PermanentError: botocore cannot use its configuration (profile, endpoint, region).
        """
        await self._open()

    async def get(self, key: str) -> Buffer | None:
        """The whole object, or ``None``. Large ones are fetched in parallel ranges.

        Raises:
            TransientError: also where the object was overwritten between two ranges.
        """
        path = self._path(key)
        with self._errors("get", key):
            client = await self._open()
            try:
                return await self._get_whole(client, path)
            except Exception as error:
                if is_absent(error):
                    return None
                raise

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        """``length`` bytes from ``start`` in one request, fewer where the object ends."""
        path = self._path(key)
        check_range(start, length)
        if length == 0:
            return None if await self.head(key) is None else b""
        with self._errors("get_range", key):
            client = await self._open()
            try:
                response = await self._get_object(client, path, start, length)
            except Exception as error:
                if is_absent(error):
                    return None
                if error_status(error) == 416:
                    return b""
                raise
            data = await _read(response)
            total = _total_bytes(response)
            if total is None:  # the server knows no ranges and sent everything
                return data[start : start + length]
            if len(data) != min(length, total - start):
                raise TransientError(f"{len(data)} bytes came, not {min(length, total - start)}")
            return data

    async def head(self, key: str) -> ObjectInfo | None:
        """Size and time of the object, or ``None``."""
        path = self._path(key)
        with self._errors("head", key):
            client = await self._open()
            try:
                response = await client.head_object(Key=path, **self._for_read)
            except Exception as error:
                if is_absent(error):
                    return None
                raise
            modified = response["LastModified"].timestamp()
            return ObjectInfo(key, response["ContentLength"], modified)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the whole object or fail; large ones in parallel parts.

        In ``create`` mode, servers whose CompleteMultipartUpload ignores the condition (all but
        AWS and MinIO) are sent one request, which holds 5 GiB at most.
        """
        path = self._path(key)
        body = memoryview(data).cast("B")
        target = {**self._for_write, "Key": path}
        if metadata:
            target["Metadata"] = dict(metadata)
        with self._errors("put", key):
            client = await self._open()
            if mode == "create":
                await self._create(client, target, body)
            else:
                await self._write(client, target, body, {})

    async def delete(self, key: str) -> None:
        """Remove the object. In a versioned bucket this hides it and frees nothing."""
        path = self._path(key)
        with self._errors("delete", key):
            client = await self._open()
            try:
                await client.delete_object(Key=path, **self._common)
            except Exception as error:
                if not is_absent(error):
                    raise

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``, a thousand to a request."""
        request = {**self._common, "Prefix": self._prefix + prefix}
        while True:
            with self._errors("list", prefix):
                client = await self._open()
                page = await client.list_objects_v2(**request)
            for each in page.get("Contents", ()):
                path = each["Key"]
                key = path[len(self._prefix) :]
                if key and path.rpartition("/")[2] != PROBE_NAME:
                    yield ObjectInfo(key, each["Size"], each["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    async def atomic_create(self) -> bool:
        """Whether the server was seen to honour ``If-None-Match: *``, and is not Swift.

        With ``conditional_create="native"`` it is taken to. OpenStack Swift's s3api honours the
        condition, but several of racing writers win.
        """
        if self._options.conditional_create == "check":
            return False
        with self._errors("atomic_create", ""):
            client = await self._open()
            if self._options.conditional_create == "native":
                return not self._swift
            return await self._ask(client) == "honoured" and not self._swift

    async def aclose(self) -> None:
        """Close all connections; calls under way fail. Calling it twice does nothing."""
        self._closed = True
        async with self._opening:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            client, self._client = self._client, None
            if client is not None:
                await client.close()

    # -- client ------------------------------------------------------------------------------

    async def _open(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is not None:
            if loop is not self._loop:
                raise ClosedError(f"{self._url} is in use on another event loop; open one for each")
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError(f"{self._url} is closed")
            if self._client is None:
                with self._errors("connect", ""):
                    self._client = await new_client(self._options)
                self._loop = loop
            return self._client

    @contextmanager
    def _errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except S3CacheError as error:
            if isinstance(error, StoreError) and not error.op:
                error.op, error.store, error.key = op, self._url, key
            raise
        except Exception as error:
            raise translate(error, op=op, store=self._url, key=key) from error

    def _path(self, key: str) -> str:
        check_key(key)
        if key.endswith(PROBE_NAME) and key.rpartition("/")[2] == PROBE_NAME:
            raise ConfigError(f"key {key!r}", f"{PROBE_NAME} is taken", "use another name")
        return self._prefix + key

    # -- reading -----------------------------------------------------------------------------

    def _get_object(self, client: Any, path: str, start: int, length: int) -> Any:
        span = f"bytes={start}-{start + length - 1}"
        return client.get_object(Key=path, Range=span, **self._for_read)

    async def _get_whole(self, client: Any, path: str) -> Buffer:
        part_bytes = self._options.part_bytes
        try:
            response = await self._get_object(client, path, 0, part_bytes)
        except Exception as error:
            if error_status(error) == 416:  # an empty object has no first byte
                return b""
            raise
        total = _total_bytes(response)
        try:
            announce(response.get("ContentLength", 0) if total is None else total)
        except BaseException:
            response["Body"].close()
            raise
        first = await _read(response)
        if total is None:  # the server knows no ranges and sent everything
            return first
        if len(first) != min(part_bytes, total):
            raise TransientError(f"{len(first)} bytes came, not {min(part_bytes, total)}")
        if total > self._options.max_object_bytes:
            raise PermanentError(
                f"the object has {total} bytes, more than max_object_bytes="
                f"{self._options.max_object_bytes}: no entry is that large; delete it"
            )
        if len(first) == total:
            return first
        whole = bytearray(total)
        view = memoryview(whole)
        view[:part_bytes] = first
        del first
        etag = response.get("ETag")
        await _all(
            partial(self._get_part, client, path, start, view[start : start + part_bytes], etag)
            for start in range(part_bytes, total, part_bytes)
        )
        return whole

    async def _get_part(
        self, client: Any, path: str, start: int, into: memoryview, etag: str | None
    ) -> None:
        # The ETag is compared here, not sent as If-Match: Ceph RGW wants it without its quotes.
        try:
            response = await self._get_object(client, path, start, len(into))
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

    # -- writing -----------------------------------------------------------------------------

    async def _create(self, client: Any, target: dict[str, Any], body: memoryview) -> None:
        if await self._trusts_condition(client):
            try:
                await self._write(client, target, body, {"IfNoneMatch": "*"})
            except Exception as error:
                if self._options.conditional_create == "native" or not refuses_condition(error):
                    raise
                self._condition = "ignored"
            else:
                return
        await self._require_absent(client, target["Key"])
        await self._write(client, target, body, {})

    async def _require_absent(self, client: Any, path: str) -> None:
        try:
            await client.head_object(Key=path, **self._for_read)
        except Exception as error:
            if is_absent(error):
                return
            raise
        raise PreconditionError("an object is already there")

    async def _write(
        self, client: Any, target: dict[str, Any], body: memoryview, condition: dict[str, str]
    ) -> None:
        if len(body) <= self._options.multipart_bytes:
            in_parts = False
        elif condition:
            # Ceph RGW and others ignore the condition on CompleteMultipartUpload.
            in_parts = self._completes_conditionally
        else:
            in_parts = True
        if not in_parts:
            self._learn(await client.put_object(Body=S3Body(body), **target, **condition))
            return
        if condition:  # S3 looks at it last, after all the bytes
            await self._require_absent(client, target["Key"])
        await self._write_parts(client, target, body, condition)

    async def _write_parts(
        self, client: Any, target: dict[str, Any], body: memoryview, condition: dict[str, str]
    ) -> None:
        started = await client.create_multipart_upload(**target)
        upload = {"Key": target["Key"], "UploadId": started["UploadId"]}
        size = max(self._options.part_bytes, MIN_PART_BYTES, -(-len(body) // _MAX_PARTS))
        try:
            parts = await _all(
                partial(self._put_part, client, upload, number, body[start : start + size])
                for number, start in enumerate(range(0, len(body), size), 1)
            )
            done = await client.complete_multipart_upload(
                MultipartUpload={"Parts": parts}, **upload, **self._for_read, **condition
            )
            # S3 answers 200 before it knows, and may put an error into the body, or nothing:
            # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
            # botocore turns the former into an exception.
            if "ETag" not in done:
                raise TransientError("the server did not say that the upload is complete")
        except BaseException:
            await self._abort(client, upload)
            raise

    async def _put_part(
        self, client: Any, upload: dict[str, str], number: int, body: memoryview
    ) -> dict[str, Any]:
        done = await client.upload_part(
            PartNumber=number, Body=S3Body(body), **upload, **self._for_read
        )
        return {"PartNumber": number, "ETag": done["ETag"]}

    async def _abort(self, client: Any, upload: dict[str, str]) -> None:
        """Free the parts, as far as it goes: what is left is for the bucket's lifecycle rule."""
        # a task of its own, so that a cancelled writer still gets it sent
        task = self._spawn(client.abort_multipart_upload(**upload, **self._common))
        await asyncio.wait({task}, timeout=_ABORT_TIMEOUT_S)

    # -- what the server can do --------------------------------------------------------------

    async def _trusts_condition(self, client: Any) -> bool:
        if self._options.conditional_create != "auto":
            return self._options.conditional_create == "native"
        try:
            return await self._ask(client) != "ignored"
        except Exception:  # noqa: BLE001 - the write will say what is wrong, if it still is
            return True

    async def _ask(self, client: Any) -> _Condition:
        """Ask the server once, however many writers wait; failing to is not remembered."""
        if self._condition is not None:
            return self._condition
        if self._asking is None or self._asking.done():
            self._asking = self._spawn(self._probe(client))
        self._condition = answer = await asyncio.shield(self._asking)
        return answer

    async def _probe(self, client: Any) -> _Condition:
        target = {**self._for_write, "Key": self._prefix + PROBE_NAME}
        # The second round tells a server that has just created the marker (412 now) from one
        # that ignores the condition (200 again). Once the marker exists, one round will do.
        for _ in range(2):
            try:
                response = await client.put_object(Body=_PROBE_TEXT, IfNoneMatch="*", **target)
            except Exception as error:
                self._learn(getattr(error, "response", None) or {})
                if refuses_condition(error):
                    return "ignored"
                if error_status(error) in (409, 412):
                    return "honoured"
                if error_status(error) in (401, 403):
                    return "assumed"
                raise
            self._learn(response)
        return "ignored"

    def _learn(self, response: Mapping[str, Any]) -> None:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if "x-openstack-request-id" in headers or "x-trans-id" in headers:
            self._swift = True
        server = headers.get("server", "").lower()
        self._completes_conditionally = server.startswith(("amazons3", "minio"))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen


async def _read(response: Mapping[str, Any]) -> Buffer:
    body = response["Body"]
    length = response.get("ContentLength", 0)
    async with body:  # what this gives is aiohttp's response: without the check of the length
        if length > _READ_AT_ONCE_BYTES:
            # Into place: otherwise the pieces take as much memory again as the whole.
            whole = bytearray(length)
            filled = await _fill(memoryview(whole), body)
            return whole if filled == length else whole[:filled]
        data: bytes = await body.read()
        return data


async def _fill(into: memoryview, body: Any) -> int:
    """Read the body to its end; how many bytes that were."""
    filled = 0
    while chunk := await body.read(CHUNK_BYTES):
        if filled + len(chunk) > len(into):
            raise TransientError(f"more than {len(into)} bytes came")
        into[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return filled


def _total_bytes(response: Mapping[str, Any]) -> int | None:
    """The object's size as a ranged answer states it; ``None`` if the answer is the whole."""
    stated = response.get("ContentRange")
    if stated is None:
        return None
    match = _CONTENT_RANGE.fullmatch(stated)
    if match is None:
        raise PermanentError(f"Content-Range {stated!r} states no size; check endpoint_url")
    return int(match[3])


async def _all(calls: Iterable[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Results in order, a few at a time; the first failure, or being cancelled, ends all."""
    limit = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def limited(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
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
