"""Objects in a bucket of AWS S3, or of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache.errors import (
    PermanentError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.store._base import (
    AcceptSize,
    Buffer,
    NotAccepted,
    ObjectInfo,
    PutMode,
    Store,
    check_key,
    check_range,
    is_key,
    logger,
)
from s3cache.store._s3_client import CHUNK_BYTES, Clients
from s3cache.store._s3_errors import error_status, is_absent, refuses_condition, translate

if TYPE_CHECKING:
    from s3cache.store._url import S3Options

_T = TypeVar("_T")
_R = TypeVar("_R")

# Enough to use the bandwidth, few enough to leave connections for small requests.
_PARTS_AT_ONCE = 8
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_BYTES = 5 * 2**20
_MAX_PARTS = 10_000
# The longest pauses before the attempts of a request in a multipart upload.
_PAUSES_S = (0.0, 1.0, 4.0, 16.0)
_ABORT_TIMEOUT_S = 5.0
_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")

# The name of the object for testing the server, under the store's prefix. It is no legal key.
_PROBE_NAME = ".s3cache-probe"
_PROBE_TEXT = b"s3cache asks with this object whether the server honours If-None-Match: *\n"


class S3Store(Store):
    """A :class:`~s3cache.store.Store` in one bucket, under one prefix.

    The client is opened by the first call (about 0.8 s, see :meth:`connect`) and belongs to that
    event loop. If its credentials are refused, unless they were given as options, they are loaded
    again, and if they are others, the call is repeated. Otherwise only parts of an upload are
    retried here, so that a lost request does not repeat all of them: wrap the store for other
    retries.

    The server verifies the SHA-256 of every uploaded body, as it is part of the signature. A
    download is one version of an object: parts of two versions are never joined. Large objects are
    read in parallel ranges, and written in parallel parts. But if CompleteMultipartUpload ignores
    the condition (on all servers except AWS and MinIO), ``put(mode="create")`` uses one request,
    which is limited to 5 GiB.

    With ``conditional_create="auto"`` the first ``put(mode="create")`` writes a marker named
    ``.s3cache-probe``, which is no legal key, under the prefix, to test whether the server supports
    ``If-None-Match``.

    The answer to HEAD has no body, so :meth:`head` returns ``None`` for a missing bucket too. In a
    versioned bucket, :meth:`delete` hides an object and frees no space.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._url = options.url
        self._prefix = f"{options.prefix}/" if options.prefix else ""
        self._clients = Clients(options)
        self._honours_condition: bool | None = None
        self._asking = asyncio.Lock()

        def given(**fields: Any) -> dict[str, Any]:
            return {name: value for name, value in fields.items() if value is not None}

        algorithm = None if options.sse_c_key is None else "AES256"
        self._common = given(Bucket=options.bucket, RequestPayer=options.request_payer)
        self._for_read = self._common | given(
            SSECustomerAlgorithm=algorithm, SSECustomerKey=options.sse_c_key
        )
        self._for_write = self._for_read | given(
            ContentType="application/octet-stream",
            ServerSideEncryption=None if options.sse in ("none", "C") else options.sse,
            SSEKMSKeyId=options.sse_kms_key_id,
            StorageClass=options.storage_class,
        )

    @property
    def url(self) -> str:
        """Bucket, prefix and endpoint; :func:`~s3cache.store.parse_url` reads it back."""
        return self._url

    async def connect(self) -> None:
        """Open the client now, mostly on another thread, so that calls need not wait for it.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
            PermanentError: botocore cannot use its configuration (profile, endpoint, region).
        """

        async def send_nothing(client: Any) -> None: ...

        await self._call("connect", "", send_nothing)

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        path = self._path(key)
        return await self._call("get", key, lambda client: self._read(client, path, accept_size))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        path = self._path(key)
        check_range(start, length)
        if length == 0:
            return None if await self.head(key) is None else b""

        async def read(client: Any) -> Buffer:
            answer = await self._get_range(client, path, start, length)
            if answer is None:
                return b""
            async with answer["Body"]:
                total, is_range = self._total_bytes(answer)
                data = bytearray(min(length, total - start) if is_range else total)
                await _fill(memoryview(data), answer["Body"])
                return data if is_range else data[start : start + length]

        return await self._call("get_range", key, read)

    async def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)

        async def head(client: Any) -> ObjectInfo:
            answer = await client.head_object(Key=path, **self._for_read)
            return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

        return await self._call("head", key, head)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        body = memoryview(data).cast("B")
        target = {**self._for_write, "Key": self._path(key), "Metadata": dict(metadata or {})}

        async def put(client: Any) -> None:
            if mode == "create":
                if await self._may_condition(client):
                    target["IfNoneMatch"] = "*"
                else:
                    await self._require_absent(client, target["Key"])
            is_large = len(body) > self._options.multipart_bytes
            if not (is_large and await self._put_in_parts(client, target, body)):
                answer = await client.put_object(Body=_Body(body), **target)
                _ = answer["ETag"]  # missing in the answer of a login portal

        await self._call("put", key, put)

    async def delete(self, key: str) -> None:
        path = self._path(key)
        await self._call(
            "delete", key, lambda client: client.delete_object(Key=path, **self._common)
        )

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[list[ObjectInfo], str | None]:
        path = self._prefix + prefix
        going_on = {"ContinuationToken": after} if after else {}

        async def list_page(client: Any) -> tuple[list[ObjectInfo], str | None]:
            page = await client.list_objects_v2(**self._common, Prefix=path, **going_on)
            infos = [
                ObjectInfo(
                    listed["Key"][len(self._prefix) :],
                    listed["Size"],
                    listed["LastModified"].timestamp(),
                )
                for listed in page.get("Contents", ())
                if listed["Key"].startswith(path)  # some proxies drop the request's query
            ]
            # Consoles create an object "dir/" for a directory; this and the probe are no keys.
            keys = [info for info in infos if is_key(info.key)]
            token = page["NextContinuationToken"] if page["IsTruncated"] else None
            if token is not None and token == after:
                raise TransientError("the listing goes in circles; check endpoint_url")
            return keys, token

        page = await self._call("list", prefix, list_page)
        assert page is not None
        return page

    async def atomic_create(self) -> bool:
        """Return whether the server supports ``If-None-Match: *``.

        With ``conditional_create="native"`` this is assumed.
        """
        return bool(await self._call("atomic_create", "", self._may_condition))

    def forget_failures(self) -> None:
        self._clients.forget_failures()

    async def aclose(self) -> None:
        """Close all connections; running calls fail. A second call does nothing."""
        await self._clients.aclose()

    # -- calls

    async def _call(self, op: str, key: str, work: Callable[[Any], Awaitable[_T]]) -> _T | None:
        """Run ``work`` with a client; return its result, or None if the object is absent."""
        try:
            return await self._clients.run(work)
        except Exception as error:
            if op in ("get", "get_range", "head", "delete") and is_absent(error):
                return None
            ours = translate(error, op=op, store=self._url, key=key)
            if isinstance(ours, StoreError) and not ours.op:
                ours.op, ours.store, ours.key = op, self._url, key
            if ours is error:
                raise
            # Errors without an answer may contain the URL of a proxy, with its password.
            raise ours from (error if error_status(error) else None)

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    # -- creating

    async def _may_condition(self, client: Any) -> bool:
        """Return whether the server supports ``If-None-Match: *``; test it once.

        AWS, MinIO and Ceph RGW support it on a write; others ignore or refuse it. If the marker may
        not be written, support is assumed. A failure is not remembered.
        """
        if self._options.conditional_create != "auto":
            return self._options.conditional_create == "native"
        async with self._asking:
            if self._honours_condition is None:
                self._honours_condition = await self._probe(client)
            return self._honours_condition

    async def _probe(self, client: Any) -> bool:
        # The second round distinguishes a server that has just created the marker (412 now) from
        # one that ignores the condition (200 again). If the marker exists, one round is enough.
        marker = {**self._for_write, "Key": self._prefix + _PROBE_NAME, "IfNoneMatch": "*"}
        for _ in range(2):
            try:
                await client.put_object(Body=_PROBE_TEXT, **marker)
            except Exception as error:
                if refuses_condition(error):
                    return False
                if error_status(error) in (401, 403, 409, 412):
                    return True
                raise
        return False

    async def _require_absent(self, client: Any, path: str) -> None:
        try:
            await client.head_object(Key=path, **self._for_read)
        except Exception as error:
            if is_absent(error):
                return
            raise
        raise PreconditionError("an object is already there")

    # -- writing in parts

    async def _put_in_parts(self, client: Any, target: dict[str, Any], body: memoryview) -> bool:
        """Write an object in parts; return False if the server would ignore ``IfNoneMatch``."""
        condition = {name: target[name] for name in target if name == "IfNoneMatch"}
        others = {name: target[name] for name in target if name != "IfNoneMatch"}
        begun = await client.create_multipart_upload(**others)
        upload = {"Key": target["Key"], "UploadId": begun["UploadId"]}
        part_of = {**upload, **self._for_read}
        size = max(self._options.part_bytes, MIN_PART_BYTES, -(-len(body) // _MAX_PARTS))
        written = False

        async def send(start: int) -> dict[str, Any]:
            number, part = start // size + 1, body[start : start + size]
            etag = await _persistently(
                lambda: client.upload_part(PartNumber=number, Body=_Body(part), **part_of)
            )
            return {"PartNumber": number, "ETag": etag}

        try:
            if condition:
                server = begun["ResponseMetadata"]["HTTPHeaders"].get("server", "")
                if not server.lower().startswith(("amazons3", "minio")):
                    return False
                # S3 checks the condition last, after it has received all bytes.
                await self._require_absent(client, target["Key"])
            parts = await concurrently(send, range(0, len(body), size), at_once=_PARTS_AT_ONCE)
            whole = {"MultipartUpload": {"Parts": parts}, **part_of, **condition}
            await _persistently(lambda: client.complete_multipart_upload(**whole))
            written = True
            return True
        finally:
            if not written:  # if this fails, the bucket's lifecycle rule removes the parts
                abort = client.abort_multipart_upload(**upload, **self._common)
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(abort, _ABORT_TIMEOUT_S)

    # -- reading

    async def _get_range(
        self, client: Any, path: str, start: int, length: int
    ) -> Mapping[str, Any] | None:
        """Return the answer to a request for a range; None if the object ends before."""
        span = f"bytes={start}-{start + length - 1}"
        try:
            answer: Mapping[str, Any] = await client.get_object(
                Key=path, Range=span, **self._for_read
            )
            return answer
        except Exception as error:
            if error_status(error) == 416:
                return None
            raise

    async def _read(
        self, client: Any, path: str, accept_size: AcceptSize | None
    ) -> Buffer | NotAccepted:
        """Read one version of the object, in as many ranges as necessary."""
        part_bytes = self._options.part_bytes
        answer = await self._get_range(client, path, 0, part_bytes)
        if answer is None:  # an empty object has no first byte
            return b""
        async with answer["Body"]:  # aiohttp's response, which is closed if it was not read
            total, is_range = self._total_bytes(answer)
            if accept_size is not None and not accept_size(total):
                return NotAccepted(total)
            whole = bytearray(total)
            view = memoryview(whole)
            first = view[:part_bytes] if is_range else view
            await _fill(first, answer["Body"])

        async def read_part(start: int) -> None:
            into = view[start : start + part_bytes]
            # Compare the ETag here instead of sending If-Match: Ceph RGW wants it without quotes.
            part = await self._get_range(client, path, start, len(into))
            if part is not None:
                async with part["Body"]:
                    if part.get("ETag") == answer.get("ETag") and "ContentRange" in part:
                        return await _fill(into, part["Body"])
            raise TransientError("the object was overwritten while it was read")

        starts = range(len(first), total, part_bytes)
        await concurrently(read_part, starts, at_once=_PARTS_AT_ONCE)
        return whole

    def _total_bytes(self, answer: Mapping[str, Any]) -> tuple[int, bool]:
        """Return the object's size, and whether the answer is a range; some servers send none."""
        stated = answer.get("ContentRange")
        if stated is None:
            size = answer["ContentLength"]
        else:
            match = _CONTENT_RANGE.fullmatch(stated)
            if match is None:
                raise PermanentError(f"Content-Range {stated!r} states no size; check endpoint_url")
            size = int(match[1])
        if size > (most := self._options.max_object_bytes):
            raise PermanentError(
                f"the object has {size} bytes, more than max_object_bytes={most}: "
                "no entry is that large; delete it, or check the server"
            )
        return size, stated is not None


async def _fill(into: memoryview, body: Any) -> None:
    filled = 0
    # Chunks as they arrive: read(n) would copy each, and the remainder again.
    while chunk := await body.content.readany():
        if filled + len(chunk) > len(into):
            raise TransientError(f"more than {len(into)} bytes came")
        into[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if filled != len(into):
        raise TransientError(f"{filled} bytes came, not {len(into)}")


async def _persistently(request: Callable[[], Awaitable[Mapping[str, Any]]]) -> Any:
    """Return the ETag in the answer to a request; repeat the request if that may help.

    A server refuses to complete an upload twice. So raise the first failure, even if the last one
    differs: a later attempt of the caller finds the object.
    """
    failure: Exception | None = None
    for pause_s in _PAUSES_S:
        await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311 - no secret
        try:
            return (await request())["ETag"]  # empty from Ceph RGW
        except Exception as error:  # noqa: BLE001 - what remains is raised
            failure, ours = failure or error, translate(error, op="put", store="")
            if not isinstance(ours, TransientError):
                break
            logger.info("a part of an upload: %s", ours)
    assert failure is not None
    raise failure


async def concurrently(
    work: Callable[[_T], Awaitable[_R]], items: Iterable[_T], *, at_once: int = 16
) -> list[_R]:
    """Return the results in order; a failure or cancellation cancels all of them."""
    limit = asyncio.Semaphore(at_once)

    async def one(item: _T) -> _R:
        async with limit:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _Body:
    """Bytes as a file for botocore (hashing) and as an async iterable for aiohttp (sending).

    aiohttp would copy plain bytes, with a warning; botocore refuses a memoryview.
    """

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
