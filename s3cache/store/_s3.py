"""Objects in a bucket of AWS S3, or of a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from s3cache.errors import AccessDeniedError, PreconditionError, StoreError
from s3cache.store._base import (
    AcceptSize,
    Buffer,
    ObjectInfo,
    PutMode,
    Store,
    check_key,
    check_range,
    is_key,
)
from s3cache.store._s3_bodies import (
    GetRange,
    S3Body,
    read_range,
    read_whole,
    require_stored,
    write_parts,
)
from s3cache.store._s3_client import Clients
from s3cache.store._s3_errors import (
    error_status,
    is_absent,
    not_an_s3_answer,
    refuses_condition,
    translate,
)
from s3cache.store._s3_options import S3Options

_T = TypeVar("_T")

_ABORT_TIMEOUT_S = 5.0
# An answer to ListObjectsV2 has some of them, even where there is no object.
_LISTING_FIELDS = ("IsTruncated", "KeyCount", "Name", "Contents")

# The name of the object that the server is asked with, under the store's prefix.
_PROBE_NAME = ".s3cache-probe"
_PROBE_TEXT = b"s3cache asks with this object whether the server honours If-None-Match: *\n"
_Condition: TypeAlias = Literal["honoured", "ignored", "assumed"]


class S3Store(Store):
    """A :class:`~s3cache.store.Store` in one bucket, under one prefix.

    The client is opened by the first call (about 0.8 s, see :meth:`connect`) and belongs to the
    event loop that made it. Where its credentials are refused the next call looks for others, as
    far as they were left to botocore. Nothing is retried here: wrap the store for that.

    The server verifies the SHA-256 of every uploaded body, as it is part of the signature. A
    download is one version of an object: parts of two versions are never joined. Large objects are
    read in parallel ranges, and written in parallel parts; but with ``put(mode="create")`` in one
    request, which holds 5 GiB at most, where CompleteMultipartUpload ignores the condition (all
    but AWS and MinIO).

    With ``conditional_create="auto"`` the first ``put(mode="create")`` writes a marker named
    ``.s3cache-probe``, which is no key, under the prefix to learn whether the server honours
    ``If-None-Match``.

    The answer to HEAD has no body, so :meth:`head` gives ``None`` for a missing bucket too. In a
    versioned bucket :meth:`delete` hides an object and frees nothing.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._url = options.url
        self._prefix = f"{options.prefix}/" if options.prefix else ""
        self._clients = Clients(options)
        self._describe_requests(options)
        # Unlike a key's, its name begins with a dot.
        self._probe = _ServerProbe({**self._for_write, "Key": self._prefix + _PROBE_NAME})

    def _describe_requests(self, options: S3Options) -> None:
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

    def written_as(self, note: bytes) -> S3Store:
        """Return this store with objects written as another store's :attr:`S3Options.note` says.

        The two share everything else; closing one closes both.

        Raises:
            ConfigError: it needs an SSE-C key that was not given here.
        """
        if note == self._options.note:
            return self
        other = copy.copy(self)
        other._describe_requests(self._options.as_noted(note))
        return other

    def __repr__(self) -> str:
        return f"S3Store({self._url!r})"

    @property
    def url(self) -> str:
        """Bucket, prefix and endpoint; :func:`~s3cache.store.parse_url` reads it back."""
        return self._url

    async def connect(self) -> None:
        """Open the client now, mostly on another thread, so that no call pays for it.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
            PermanentError: botocore cannot use its configuration (profile, endpoint, region).
        """

        async def send_nothing(client: Any) -> None: ...

        await self._call("connect", "", send_nothing)

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        path = self._path(key)
        return await self._call(
            "get",
            key,
            lambda client: read_whole(self._ranges(client, path), self._options, accept_size),
        )

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        path = self._path(key)
        check_range(start, length)
        if length == 0:
            return None if await self.head(key) is None else b""
        return await self._call(
            "get_range",
            key,
            lambda client: read_range(self._ranges(client, path), self._options, start, length),
        )

    async def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)

        async def head(client: Any) -> ObjectInfo:
            answer = await client.head_object(Key=path, **self._for_read)
            return _info(key, answer, "ContentLength")

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
        target = {**self._for_write, "Key": self._path(key)}
        if metadata:
            target["Metadata"] = dict(metadata)
        write = self._create if mode == "create" else self._write
        await self._call("put", key, lambda client: write(client, target, body))

    async def delete(self, key: str) -> None:
        path = self._path(key)
        await self._call(
            "delete", key, lambda client: client.delete_object(Key=path, **self._common)
        )

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        # Consoles make an object "dir/" for a directory, which is no key.
        request = {**self._common, "Prefix": self._prefix + prefix}

        async def list_page(client: Any) -> tuple[list[ObjectInfo], str | None]:
            page = await client.list_objects_v2(**request)
            if page.keys().isdisjoint(_LISTING_FIELDS):
                raise not_an_s3_answer("is no listing")
            infos = [
                _info(path[len(self._prefix) :], listed, "Size")
                for listed in page.get("Contents", ())
                # Some servers and proxies lose the request's query.
                if (path := str(listed.get("Key"))).startswith(request["Prefix"])
            ]
            if not page.get("IsTruncated"):
                return infos, None
            token: str | None = page.get("NextContinuationToken")
            if token in (None, request.get("ContinuationToken")):
                raise not_an_s3_answer("does not say where the listing goes on")
            return infos, token

        while True:
            page = await self._call("list", prefix, list_page)
            assert page is not None
            infos, token = page
            for info in infos:
                if is_key(info.key):  # the probe's is none
                    yield info
            if token is None:
                return
            request["ContinuationToken"] = token

    async def atomic_create(self) -> bool:
        """Return whether the server was seen to honour ``If-None-Match: *``, and is not Swift.

        With ``conditional_create="native"`` it is assumed to.
        """
        if self._options.conditional_create == "check":
            return False

        async def ask(client: Any) -> bool:
            trusted = self._options.conditional_create == "native"
            honoured = trusted or await self._probe.ask(client) == "honoured"
            return honoured and not self._probe.is_swift

        return bool(await self._call("atomic_create", "", ask))

    async def aclose(self) -> None:
        """Close all connections; calls under way fail. Calling it twice does nothing."""
        await self._clients.aclose()

    # -- calls

    async def _call(self, op: str, key: str, work: Callable[[Any], Awaitable[_T]]) -> _T | None:
        """Return what ``work`` makes of a client; None if the server says the object is absent."""
        try:
            async with self._clients.use() as client:
                return await work(client)
        except Exception as error:
            if op in ("get", "get_range", "head", "delete") and is_absent(error):
                return None
            ours = translate(error, op=op, store=self._url, key=key)
            if isinstance(ours, StoreError) and not ours.op:
                ours.op, ours.store, ours.key = op, self._url, key
            if isinstance(ours, AccessDeniedError):
                self._clients.refuse()
            if ours is error:
                raise
            raise ours from error

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _ranges(self, client: Any, path: str) -> GetRange:
        async def get(start: int, length: int) -> Mapping[str, Any] | None:
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

        return get

    # -- writing

    async def _create(self, client: Any, target: dict[str, Any], body: memoryview) -> None:
        if await self._trusts_condition(client):
            try:
                await self._write(client, target, body, {"IfNoneMatch": "*"})
            except Exception as error:
                if self._options.conditional_create == "native" or not refuses_condition(error):
                    raise
                self._probe.note_refusal()
            else:
                return
        await self._require_absent(client, target["Key"])
        await self._write(client, target, body)

    async def _trusts_condition(self, client: Any) -> bool:
        if self._options.conditional_create != "auto":
            return self._options.conditional_create == "native"
        try:
            return await self._probe.ask(client) != "ignored"
        except Exception:  # noqa: BLE001 - the write meets the error again, if it persists
            return True

    async def _require_absent(self, client: Any, path: str) -> None:
        try:
            await client.head_object(Key=path, **self._for_read)
        except Exception as error:
            if is_absent(error):
                return
            raise
        raise PreconditionError("an object is already there")

    async def _write(
        self,
        client: Any,
        target: dict[str, Any],
        body: memoryview,
        condition: Mapping[str, str] = {},
    ) -> None:
        # Ceph RGW and others ignore the condition on CompleteMultipartUpload.
        may_use_parts = not condition or self._probe.completes_conditionally
        if len(body) <= self._options.multipart_bytes or not may_use_parts:
            answer = await client.put_object(Body=S3Body(body), **target, **condition)
            require_stored(answer)
            self._probe.learn(answer)
            return
        if condition:  # S3 looks at it last, after all the bytes
            await self._require_absent(client, target["Key"])
        started = await client.create_multipart_upload(**target)
        if not started.get("UploadId"):
            raise not_an_s3_answer("does not say that an upload has begun")
        upload = {"Key": target["Key"], "UploadId": started["UploadId"]}
        try:
            await write_parts(
                client, {**upload, **self._for_read}, body, self._options.part_bytes, condition
            )
        except BaseException:
            await self._abort(client, upload)
            raise

    async def _abort(self, client: Any, upload: dict[str, str]) -> None:
        """Free the parts, as far as it goes: what is left is for the bucket's lifecycle rule."""
        with contextlib.suppress(Exception):
            abort = client.abort_multipart_upload(**upload, **self._common)
            await asyncio.wait_for(abort, _ABORT_TIMEOUT_S)


def _info(key: str, answer: Mapping[str, Any], size: str) -> ObjectInfo:
    """Return what an answer says about an object; its size is in the field of that name."""
    try:
        return ObjectInfo(key, answer[size], answer["LastModified"].timestamp())
    except KeyError as missing:
        raise not_an_s3_answer(f"says nothing about the object's {missing}") from None


class _ServerProbe:
    """Asks one server, once, what a store depends on and only the server can say.

    AWS, MinIO and Ceph RGW honour ``If-None-Match: *`` on a write; others ignore or refuse it. With
    OpenStack Swift's s3api several of racing writers win. On CompleteMultipartUpload, all but AWS
    and MinIO ignore it. Where the marker (``target``) may not be written, it is assumed to work.
    """

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._target = target
        self._condition: _Condition | None = None
        self._asking = asyncio.Lock()
        self.is_swift = False
        self.completes_conditionally = False

    async def ask(self, client: Any) -> _Condition:
        """Ask the server once, however many writers wait; failing to is not remembered."""
        async with self._asking:
            if self._condition is None:
                self._condition = await self._probe(client)
            return self._condition

    def note_refusal(self) -> None:
        """Remember that a write was refused for its condition, whatever the server said before."""
        self._condition = "ignored"

    def learn(self, response: Mapping[str, Any]) -> None:
        """Learn from the headers of an answer to a write."""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if "x-openstack-request-id" in headers or "x-trans-id" in headers:
            self.is_swift = True
        server = headers.get("server", "").lower()
        self.completes_conditionally = server.startswith(("amazons3", "minio"))

    async def _probe(self, client: Any) -> _Condition:
        # The second round distinguishes a server that has just created the marker (412 now) from
        # one that ignores the condition (200 again). Once the marker exists, one round will do.
        for _ in range(2):
            try:
                response = await client.put_object(
                    Body=_PROBE_TEXT, IfNoneMatch="*", **self._target
                )
            except Exception as error:
                self.learn(getattr(error, "response", None) or {})
                if refuses_condition(error):
                    return "ignored"
                if error_status(error) in (409, 412):
                    return "honoured"
                if error_status(error) in (401, 403):
                    return "assumed"
                raise
            self.learn(response)
        return "ignored"
