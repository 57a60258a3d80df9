"""Small S3 servers in memory, each with one documented habit of a server that is not plain AWS."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from email.utils import format_datetime
from http.client import HTTPConnection
from itertools import count
from typing import TypeAlias
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

from tests.support.scripted import Reply, Request, ScriptedServer, error_reply
from tests.support.waiting import LONG_S

_EXISTS = error_reply(412, "PreconditionFailed")


def _xml(name: str, **fields: str) -> Reply:
    inner = "".join(f"<{field}>{value}</{field}>" for field, value in fields.items())
    return Reply(200, {"content-type": "application/xml"}, f"<{name}>{inner}</{name}>".encode())


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class FakeS3:
    """The requests that our client sends, path-style, as AWS documents their answers.

    Attributes:
        objects: the bytes by key.
        writes: the keys of all requests that would write an object or a part, in order.
    """

    page = 100

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.writes: list[str] = []
        self._parts: dict[str, dict[int, bytes]] = {}
        self._numbers = count()
        self._times: dict[str, datetime] = {}

    def __call__(self, request: Request) -> Reply:
        path, _, text = request.target.partition("?")
        key = unquote(path).split("/", 2)[2] if path.count("/") > 1 else ""
        query = dict(parse_qsl(text, keep_blank_values=True))
        if request.method in ("PUT", "POST") and "uploads" not in query:
            self.writes.append(key)
        refusal = self.refuse(request, key, query)
        if refusal is not None:
            return refusal
        if "uploads" in query or "uploadId" in query:
            return self._multipart(request, key, query)
        if not key:
            return self._list(query)
        if request.method == "PUT":
            return self._write(request, key, request.body)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return Reply(204)
        return self._read(request, key)

    def refuse(self, request: Request, key: str, query: dict[str, str]) -> Reply | None:
        """Return the answer to a request that this server refuses."""
        return None

    def honours(self, request: Request, key: str) -> bool:
        """Return whether this server honours If-None-Match in a request."""
        return True

    def _write(self, request: Request, key: str, data: bytes) -> Reply:
        conditional = "if-none-match" in request.headers and self.honours(request, key)
        if conditional and key in self.objects:
            return _EXISTS
        self.objects[key], self._times[key] = data, datetime.now(timezone.utc)
        return Reply(headers={"etag": _etag(data)})

    def _read(self, request: Request, key: str) -> Reply:
        data = self.objects.get(key)
        if data is None:
            return error_reply(404, "NoSuchKey")
        modified = format_datetime(self.modified(key), usegmt=True)
        headers = {"etag": _etag(data), "last-modified": modified}
        if request.method == "HEAD":
            return Reply(200, headers, length=len(data))
        if "range" not in request.headers:
            return Reply(200, headers, data)
        first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        if first >= len(data):
            return error_reply(416, "InvalidRange")
        part = data[first : last + 1]
        headers["content-range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return Reply(206, headers, part)

    def modified(self, key: str) -> datetime:
        """Return when an object was written; objects that a test planted are new."""
        return self._times.setdefault(key, datetime.now(timezone.utc))

    def order(self, key: str) -> str:
        """Return what listings are sorted by."""
        return key

    def _list(self, query: dict[str, str]) -> Reply:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = [key for key in self.objects if key.startswith(prefix)]
        keys = [key for key in sorted(keys, key=self.order) if self.order(key) > after]
        page, rest = keys[: self.page], keys[self.page :]
        listed = "".join(
            f"<Contents><Key>{quote(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<LastModified>{self.modified(key).isoformat()}</LastModified></Contents>"
            for key in page
        )
        answer = {"EncodingType": "url", "IsTruncated": str(bool(rest)).lower()}
        if rest:
            answer["NextContinuationToken"] = escape(self.order(page[-1]))
        reply = _xml("ListBucketResult", **answer)
        reply.body = reply.body.replace(b"</ListBucket", listed.encode() + b"</ListBucket")
        return reply

    def _multipart(self, request: Request, key: str, query: dict[str, str]) -> Reply:
        if "uploads" in query:
            upload = f"upload-{next(self._numbers)}"
            self._parts[upload] = {}
            reply = _xml("InitiateMultipartUploadResult", UploadId=upload)
            reply.headers["server"] = "AmazonS3"
            return reply
        parts = self._parts[query["uploadId"]]
        if request.method == "PUT":
            parts[int(query["partNumber"])] = request.body
            return Reply(headers={"etag": _etag(request.body)})
        if request.method == "DELETE":
            del self._parts[query["uploadId"]]
            return Reply(204)
        written = self._write(request, key, b"".join(parts[number] for number in sorted(parts)))
        if written.status != 200:
            return written
        return _xml("CompleteMultipartUploadResult", ETag=written.headers["etag"])


class OneWriteASecond(FakeS3):
    """R2 and Google take one write of one object a second, and answer others with 429.

    https://developers.cloudflare.com/r2/platform/limits/
    """

    def __init__(self) -> None:
        super().__init__()
        self.too_often = 0
        self._written: dict[str, float] = {}

    def refuse(self, request: Request, key: str, query: dict[str, str]) -> Reply | None:
        now = time.monotonic()
        if request.method != "PUT" or "uploadId" in query:
            return None
        if now - self._written.get(key, float("-inf")) < 1.0:
            self.too_often += 1
            return error_reply(429, "TooManyRequests", "Reduce your rate of writes to an object")
        self._written[key] = now
        return None


class ObjectLock(FakeS3):
    """A bucket with Object Lock and default retention takes no body without a digest in a header.

    It keeps every version, and removing an object only hides it. Parts may have a checksum only if
    the upload names its algorithm; then the completion must repeat the checksums.
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-lock-managing.html
    """

    def __init__(self, knows: tuple[str, ...] = ("content-md5", "x-amz-checksum-sha256")) -> None:
        super().__init__()
        self.knows = knows
        self.versions: list[tuple[str, bytes]] = []
        self._with_checksums: dict[str, bool] = {}

    def refuse(self, request: Request, key: str, query: dict[str, str]) -> Reply | None:
        headers, upload = request.headers, query.get("uploadId", "")
        if request.method == "PUT":
            sent = {name: headers[name] for name in self.knows if name in headers}
            if not sent:
                wanted = "Content-MD5 OR x-amz-checksum- HTTP header is required"
                return error_reply(400, "InvalidRequest", wanted)
            for name, digest in sent.items():
                hasher = hashlib.md5 if name == "content-md5" else hashlib.sha256
                if digest != base64.b64encode(hasher(request.body).digest()).decode().lower():
                    return error_reply(400, "BadDigest")
            if upload and ("x-amz-checksum-sha256" in sent) > self._with_checksums[upload]:
                return error_reply(400, "InvalidRequest", "Checksum Type mismatch occurred")
        elif upload and self._with_checksums[upload] and request.method == "POST":
            checksums = re.findall(rb"<ChecksumSHA256>(\S+?)</ChecksumSHA256>", request.body)
            if len(checksums) != len(self._parts[upload]):
                return error_reply(400, "InvalidPart", "The part has a checksum")
        return None

    def _multipart(self, request: Request, key: str, query: dict[str, str]) -> Reply:
        reply = super()._multipart(request, key, query)
        if "uploads" in query:
            (upload,) = self._parts.keys() - self._with_checksums.keys()
            self._with_checksums[upload] = "x-amz-checksum-algorithm" in request.headers
        return reply

    def _write(self, request: Request, key: str, data: bytes) -> Reply:
        reply = super()._write(request, key, data)
        if reply.status == 200:
            self.versions.append((key, data))
        return reply


class DirectoryBucket(FakeS3):
    """S3 Express One Zone lists directories only, in no order, and wants the token of a session.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html
    """

    def order(self, key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    def refuse(self, request: Request, key: str, query: dict[str, str]) -> Reply | None:
        if "session" in query:
            keys = "<SessionToken>t</SessionToken><SecretAccessKey>s</SecretAccessKey>"
            keys += "<AccessKeyId>a</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration>"
            return _xml("CreateSessionResult", Credentials=keys)
        if request.headers.get("x-amz-s3session-token") != "t":
            return error_reply(403, "AccessDenied", "CreateSession comes first")
        is_listing = request.method == "GET" and not key
        if is_listing and not (query.get("prefix") or "/").endswith("/"):
            return error_reply(400, "InvalidRequest", "a prefix must end in a delimiter here")
        return None


class TwoBackEnds(FakeS3):
    """A gateway whose requests go to two servers in turn. One of them ignores If-None-Match.

    Attributes:
        ignores_from: the number of conditional writes before the second server joins.
    """

    def __init__(self, ignores_from: int = 0, *, in_turn: bool = True) -> None:
        super().__init__()
        self.ignores_from, self.in_turn = ignores_from, in_turn
        self._conditional = 0

    def honours(self, request: Request, key: str) -> bool:
        self._conditional += 1
        is_alone = self._conditional <= self.ignores_from
        return is_alone or (self.in_turn and self._conditional % 2 == 0)


class SmallBodies(FakeS3):
    """A proxy that refuses bodies over a limit, as nginx does (client_max_body_size)."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def refuse(self, request: Request, key: str, query: dict[str, str]) -> Reply | None:
        if len(request.body) <= self.limit:
            return None
        page = b"<html><head><title>413 Request Entity Too Large</title></head></html>"
        return Reply(413, {"content-type": "text/html", "server": "nginx"}, page)


Rule: TypeAlias = "Callable[[Request], Reply | None]"


class Gate:
    """A gate in front of an S3 server: it answers requests by ``rule``, or forwards them.

    Attributes:
        rule: returns the answer to a request, or ``None`` to forward the request.
    """

    def __init__(self, server_port: int, rule: Rule = lambda _: None) -> None:
        self.rule = rule
        self._port = server_port

    def __call__(self, request: Request) -> Reply:
        if (reply := self.rule(request)) is not None:
            return reply
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=LONG_S)) as server:
            server.request(request.method, request.target, request.body, request.sent)
            answer = server.getresponse()
            content = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        length = int(headers["content-length"]) if request.method == "HEAD" else None
        for name in ("connection", "content-length", "transfer-encoding", "server"):
            headers.pop(name, None)
        return Reply(answer.status, headers, content, length)


def refusing(*methods: str) -> Rule:
    """Return a rule that refuses some methods, as for a role with few permissions."""
    return lambda request: error_reply(403, "AccessDenied") if request.method in methods else None


@contextmanager
def serving(answer: FakeS3 | Gate) -> Iterator[str]:
    """Yield the URL of a server on another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = ScriptedServer()
    server.answer = answer
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
