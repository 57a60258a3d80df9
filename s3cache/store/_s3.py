"""Objects in a bucket of AWS S3, or of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from s3cache.errors import (
    ConfigError,
    PermanentError,
    PreconditionError,
    StoreError,
    TooLargeError,
    TransientError,
)
from s3cache.store._base import (
    MAX_PATH_BYTES,
    AcceptSize,
    Buffer,
    NotAccepted,
    ObjectInfo,
    PutMode,
    Store,
    check_key,
    is_key,
    logger,
)
from s3cache.store._options import MIN_PART_BYTES, S3Options
from s3cache.store._s3_client import CHUNK_BYTES, Clients
from s3cache.store._s3_errors import answer_of, translate

_T = TypeVar("_T")
_R = TypeVar("_R")

# Enough to use the bandwidth, few enough to leave connections for small requests.
_PARTS_AT_ONCE = 8
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MAX_PARTS = 10_000
# The longest pauses before the attempts of a request in a multipart upload.
_PAUSES_S = (0.0, 1.0, 4.0, 16.0)
_ABORT_TIMEOUT_S = 5.0
_TOO_OFTEN = (429, 503)
# Pauses before a write is repeated: R2 and Google take one write of an object a second
# (https://developers.cloudflare.com/r2/platform/limits/).
_REPEAT_AFTER_S = (0.0, 1.1)
_SETTLED_S = 1.0
_LOOK_BYTES = 1 << 20  # a larger body costs more than the question whether it is there


class S3Store(Store):
    """A :class:`~s3cache.store.Store` in one bucket, under one prefix.

    The client is opened by the first call (about 0.8 s, see :meth:`connect`) and belongs to that
    event loop. If its credentials are refused, and others can be loaded, the call is repeated. Else
    only parts of an upload are retried here: wrap the store for other retries.

    The server verifies the SHA-256 of every uploaded body, as it is part of the signature. Large
    objects are read in parallel ranges of one version, and written in parallel parts. But if
    CompleteMultipartUpload ignores the condition (on all servers except AWS and MinIO),
    ``put(mode="create")`` uses one request, which is limited to 5 GiB.

    AWS honours ``If-None-Match: *`` on a write. Another server shows it by its answers: it refuses
    an object that exists, or the first object that was created here is written again, with the same
    bytes. After each create, the store checks that its object is there: a gateway may have several
    servers behind it. ``conditional_create`` names other rules.

    The answer to HEAD has no body, so :meth:`head` returns ``None`` for a missing bucket too. In a
    versioned bucket, :meth:`delete` hides an object and frees no space.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._url = options.url
        self._prefix = f"{options.prefix}/" if options.prefix else ""
        # A bucket of S3 Express One Zone, or an access point to one:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/directory-bucket-naming-rules.html
        self._is_directory_bucket = options.bucket.endswith(("--x-s3", "--xa-s3"))
        self._clients = Clients(options)
        rule, is_aws = options.conditional_create, options.endpoint is None
        # Whether it is known that the server honours the condition, without asking it.
        self._is_sure = rule == "native" or (rule == "auto" and is_aws)
        self._condition: Literal["unknown", "honoured", "ignored", "refused"] = (
            "honoured" if self._is_sure else "refused" if rule == "check" else "unknown"
        )
        self._asking = asyncio.Lock()
        self._sends_digests = False

        common = {"Bucket": options.bucket, "RequestPayer": options.request_payer}
        algorithm = None if options.sse_c_key is None else "AES256"
        read = {"SSECustomerAlgorithm": algorithm, "SSECustomerKey": options.sse_c_key}
        write = {
            "ContentType": "application/octet-stream",
            "ServerSideEncryption": None if options.sse in ("none", "C") else options.sse,
            "SSEKMSKeyId": options.sse_kms_key_id,
            "StorageClass": options.storage_class,
        }
        self._common, self._for_read, self._for_write = (
            {name: value for name, value in fields.items() if value is not None}
            for fields in (common, common | read, common | read | write)
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def via(self) -> str:
        return self._options.via

    async def connect(self) -> None:
        await self._call("connect", "", lambda client: asyncio.sleep(0))

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        path, whole = self._path(key), self._options.max_object_bytes
        work = partial(self._read, path=path, at_most=whole, accept_size=accept_size)
        return await self._call("get", key, work)

    async def get_range(self, key: str, length: int) -> Buffer | None:
        work = partial(self._read, path=self._path(key), at_most=length)
        data: Any = await self._call("get_range", key, work)
        return None if data is None else data[:length]  # some servers send the whole object

    async def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        answer = await self._call("head", key, lambda client: self._head(client, path))
        if answer is None:
            return None
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

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
        write = self._create if mode == "create" else self._write
        try:
            await self._call("put", key, lambda client: write(client, target, body))
        except TooLargeError as error:
            error.message = f"an object of {len(body)} bytes is {error.message}"
            raise

    async def delete(self, key: str) -> None:
        path = self._path(key)
        await self._call(
            "delete", key, lambda client: client.delete_object(Key=path, **self._common)
        )

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[list[ObjectInfo], str | None]:
        path = self._prefix + self._spell(prefix)
        asked = path[: path.rfind("/") + 1] if self._is_directory_bucket else path
        going_on = {"ContinuationToken": after} if after else {}

        async def list_page(client: Any) -> tuple[list[ObjectInfo], str | None]:
            page = await client.list_objects_v2(**self._common, Prefix=asked, **going_on)
            token = page["NextContinuationToken"] if page["IsTruncated"] else None
            if token is not None and token == after:
                raise TransientError("the listing goes in circles; check endpoint_url")
            infos = []
            for row in page.get("Contents", ()):
                # Some proxies drop the request's query, and some objects are not ours.
                if row["Key"].startswith(path) and is_key(key := self._key(row["Key"])):
                    infos.append(ObjectInfo(key, row["Size"], row["LastModified"].timestamp()))
            return infos, token

        page = await self._call("list", prefix, list_page)
        assert page is not None
        return page

    async def atomic_create(self) -> bool | None:
        return {"honoured": True, "unknown": None}.get(self._condition, False)

    def forget_failures(self) -> None:
        self._clients.forget_failures()

    async def aclose(self) -> None:
        await self._clients.aclose()

    # -- calls

    async def _call(self, op: str, key: str, work: Callable[[Any], Awaitable[_T]]) -> _T | None:
        """Run ``work`` with a client; return its result, or None if the object is absent."""
        try:
            return await self._clients.run(work)
        except Exception as error:
            if op in ("get", "get_range", "head", "delete") and answer_of(error).is_absence:
                return None
            translated = translate(
                error, op=op, store=self._url, key=key, sse=self._options.sse, via=self.via
            )
            if isinstance(translated, StoreError) and not translated.op:
                translated.op, translated.store, translated.key = op, self._url, key
            if translated is error:
                raise
            # Errors without an answer may contain the URL of a proxy, with its password.
            raise translated from (error if answer_of(error).status else None)

    def _path(self, key: str) -> str:
        path = self._prefix + self._spell(check_key(key))
        if (length := len(path.encode())) > MAX_PATH_BYTES:
            cause = f"has {length} bytes with the prefix, and S3 allows {MAX_PATH_BYTES}"
            raise ConfigError(f"key {key[:80]!r}", cause, "use a shorter key or prefix")
        return path

    def _spell(self, key: str) -> str:
        """Return the path of a key, or of a prefix of keys, under the store's prefix."""
        # A directory bucket only lists whole directories. There each key of entries has a
        # directory: ``v1/a/KEY.0`` is ``v1/a/KEY/~0``, as no legal key contains a ``~``.
        if not self._is_directory_bucket:
            return key
        directory, slash, name = key.rpartition("/")
        return directory + slash + name.replace(".", "/~", 1)

    def _key(self, path: str) -> str:
        """Return the key of an object; an illegal one if the object is not ours."""
        spelled = path[len(self._prefix) :]
        key = spelled.replace("/~", ".", 1) if self._is_directory_bucket else spelled
        return key if self._spell(key) == spelled else ""

    # -- creating

    async def _create(self, client: Any, target: dict[str, Any], body: memoryview) -> object:
        # Some servers ignore the condition. Others check it after they have received the body.
        if not self._is_sure or len(body) > _LOOK_BYTES:
            try:
                await self._require_absent(client, target["Key"])
            except Exception as error:
                # We may be allowed to write nevertheless, and then the condition has to hold.
                may_rely = self._condition in ("unknown", "honoured")
                if not (may_rely and answer_of(error).status == 403):
                    raise
        if self._condition == "refused":
            return await self._write(client, target, body)
        conditional, started = {**target, "IfNoneMatch": "*"}, time.monotonic()
        try:
            etag = await self._write(client, conditional, body)
        except Exception as error:
            answer = answer_of(error)
            if not self._is_sure and answer.refuses_condition:
                self._condition = "refused"
                return await self._create(client, target, body)
            if answer.status in (409, 412) and self._condition == "unknown":
                self._condition = "honoured"
            if answer.status in _TOO_OFTEN:  # another writer may have created it just now
                await self._require_absent(client, target["Key"], unless=error)
            raise
        if not self._is_sure:
            took_s = time.monotonic() - started
            await self._learn(client, conditional, body)
            await self._require_ours(client, target["Key"], etag, took_s)
        return None

    async def _learn(self, client: Any, conditional: dict[str, Any], body: memoryview) -> None:
        """Write an object again that we have just created, unless the server is known."""
        # A server that honours the condition refuses. Any other writes the same bytes again. If it
        # takes no second write now, the question stays open.
        if len(body) > self._options.multipart_bytes:
            return
        async with self._asking:
            for pause_s in _REPEAT_AFTER_S:
                if self._condition != "unknown":
                    return
                await asyncio.sleep(pause_s)
                try:
                    await self._write(client, conditional, body)
                    self._condition = "ignored"
                except Exception as error:  # noqa: BLE001 - the object is written
                    status = answer_of(error).status
                    if status in (401, 403, 409, 412):
                        self._condition = "honoured"
                    elif status not in _TOO_OFTEN:
                        return

    async def _require_ours(self, client: Any, path: str, etag: str, took_s: float) -> None:
        """Raise PreconditionError if another writer has replaced the object that we created."""
        # Wait as long as our write took: another one that began with ours has then ended, usually.
        await asyncio.sleep(min(took_s, _SETTLED_S))
        try:
            there = (await self._head(client, path)).get("ETag")
        except Exception as error:  # noqa: BLE001 - it may be removed, or not ours to read
            logger.debug("%s cannot be read back: %s", path, error)
            return
        tags = {tag.removeprefix("W/").strip('"') for tag in (etag, there) if tag}
        if len(tags) == 2:
            self._condition = "ignored"
            raise PreconditionError("another writer has replaced the object")

    async def _require_absent(
        self, client: Any, path: str, unless: Exception | None = None
    ) -> None:
        """Raise PreconditionError if there is an object; with ``unless``, ignore other errors."""
        try:
            await self._head(client, path)
        except Exception as error:
            if unless is not None or answer_of(error).is_absence:
                return
            raise
        raise PreconditionError("an object is already there") from unless

    # -- writing

    async def _write(self, client: Any, target: dict[str, Any], body: memoryview) -> str:
        """Write an object in one request or in parts; return its ETag, which may be empty."""
        has_digests, etag = self._sends_digests, None
        try:
            if len(body) > self._options.multipart_bytes:
                etag = await self._put_in_parts(client, target, body, has_digests)
            if etag is None:
                digests = _digests(body) if has_digests else {}
                answer = await client.put_object(Body=_Body(body), **target, **digests)
                etag = str(answer["ETag"])  # missing in the answer of a login portal
            return etag
        except Exception as error:
            if has_digests or not answer_of(error).requires_digest:
                raise
        self._sends_digests = True  # a bucket with Object Lock and default retention
        return await self._write(client, target, body)

    async def _put_in_parts(
        self, client: Any, target: dict[str, Any], body: memoryview, has_digests: bool
    ) -> str | None:
        """Write an object in parts; return None if the server would ignore ``IfNoneMatch``."""
        others = {**target, **({"ChecksumAlgorithm": "SHA256"} if has_digests else {})}
        is_conditional = others.pop("IfNoneMatch", None) is not None
        begun = await client.create_multipart_upload(**others)
        upload = {"Key": target["Key"], "UploadId": begun["UploadId"]}
        part_of = {**upload, **self._for_read}
        size = max(self._options.part_bytes, MIN_PART_BYTES, -(-len(body) // _MAX_PARTS))
        written = False

        async def send(start: int) -> dict[str, Any]:
            part = body[start : start + size]
            fields = {"PartNumber": start // size + 1, **(_digests(part) if has_digests else {})}
            etag = await _persistently(
                lambda: client.upload_part(Body=_Body(part), **part_of, **fields)
            )
            fields.pop("ContentMD5", None)
            return {"ETag": etag, **fields}

        try:
            whole: dict[str, Any] = {}
            if is_conditional:
                server = begun["ResponseMetadata"]["HTTPHeaders"].get("server", "")
                if not server.lower().startswith(("amazons3", "minio")):
                    return None
                whole = {"IfNoneMatch": "*"}
            parts = await concurrently(send, range(0, len(body), size), at_once=_PARTS_AT_ONCE)
            whole |= {"MultipartUpload": {"Parts": parts}, **part_of}
            etag = await _persistently(lambda: client.complete_multipart_upload(**whole))
            written = True
            return str(etag)
        finally:
            if not written:  # if this fails, the bucket's lifecycle rule removes the parts
                abort = client.abort_multipart_upload(**upload, **self._common)
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(abort, _ABORT_TIMEOUT_S)

    # -- reading

    async def _head(self, client: Any, path: str) -> Any:
        return await client.head_object(Key=path, **self._for_read)

    async def _get_range(self, client: Any, path: str, start: int, length: int) -> Any:
        """Return the answer to a request for a range; None if the object ends before."""
        span = f"bytes={start}-{start + length - 1}"
        try:
            return await client.get_object(Key=path, Range=span, **self._for_read)
        except Exception as error:
            if answer_of(error).status == 416:
                return None
            raise

    async def _read(
        self, client: Any, path: str, at_most: int, accept_size: AcceptSize | None = None
    ) -> Buffer | NotAccepted:
        """Read bytes of one version of the object, in as many ranges as necessary."""
        part_bytes = self._options.part_bytes
        answer = await self._get_range(client, path, 0, min(part_bytes, at_most))
        if answer is None:  # an empty object has no first byte
            return b""
        async with answer["Body"]:  # aiohttp's response, which is closed if it was not read
            total, is_range = self._total_bytes(answer)
            if accept_size is not None and not accept_size(total):
                return NotAccepted(total)
            whole = bytearray(min(total, at_most) if is_range else total)
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

        starts = range(len(first), len(whole), part_bytes)
        await concurrently(read_part, starts, at_once=_PARTS_AT_ONCE)
        return whole

    def _total_bytes(self, answer: Mapping[str, Any]) -> tuple[int, bool]:
        """Return the object's size, and whether the answer is a range; some servers send none."""
        stated = answer.get("ContentRange")
        size = answer["ContentLength"] if stated is None else int(stated.rpartition("/")[2])
        if size > (most := self._options.max_object_bytes):
            raise PermanentError(
                f"the object has {size} bytes, more than max_object_bytes={most}: "
                "no entry is that large; delete it, or check the server"
            )
        return size, stated is not None


def _digests(body: memoryview) -> dict[str, Any]:
    """Return the digests of a body as fields of a request; old servers know Content-MD5 only."""
    md5, sha256 = hashlib.md5(body, usedforsecurity=False), hashlib.sha256(body)
    fields = {"ContentMD5": md5, "ChecksumSHA256": sha256}
    return {name: base64.b64encode(hashed.digest()).decode() for name, hashed in fields.items()}


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
    """Return the ETag in the answer to a request; repeat the request if that may help."""
    # A server refuses to complete an upload twice. So raise the first failure, even if the last one
    # differs: a later attempt of the caller finds the object.
    failure: Exception | None = None
    for pause_s in _PAUSES_S:
        await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311 - no secret
        try:
            return (await request())["ETag"]  # empty from Ceph RGW
        except Exception as error:  # noqa: BLE001 - what remains is raised
            failure, translated = failure or error, translate(error, op="put", store="")
            if not isinstance(translated, TransientError):
                break
            logger.info("a part of an upload: %s", translated)
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
