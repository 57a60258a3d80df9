"""HTTP as every client here speaks it, those that get credentials too: straight, and in bounds."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from s3cache.errors import ConfigError, TransientError
from s3cache.store.s3._place import partition_region

__all__ = ["http_session", "region_judge"]

# The longest answer that is no object is a page of a listing: a thousand keys of a kilobyte, each
# character of which may be escaped.
_MAX_ANSWER_BYTES = 8 << 20
_CHUNK_BYTES = 64 << 10
# As AWS names its own. Others have names like RegionOne, which are signed for, and no more: where a
# server was named, its region does not change which one is asked.
_OF_AWS = re.compile(r"[a-z0-9-]{1,63}")
_OF_OTHERS = re.compile(r"[A-Za-z0-9._-]{1,63}")


@cache
def http_session() -> Any:
    """The class of sessions that clients are to have.

    One goes where it was sent, and nowhere else: aiohttp follows a redirect to any server, from
    https to http too, with all headers: signature, session token, the customer's key. That to
    another region of S3 is botocore's business: it looks up where that region is, and signs anew.

    It reads no more of an answer than an answer may have, whatever its headers say. botocore reads
    all but the bodies of objects at once, and what is an error is parsed as XML, in ten times the
    memory. The bodies of objects are bounded by who reads them.
    """
    from aiobotocore.awsrequest import AioAWSResponse
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            return _NoRedirectSession(await super()._get_session(proxy_url))

        async def send(self, request: Any) -> Any:
            _check_proxy(self._proxy_config.proxy_url_for(request.url))
            is_object, request.stream_output = request.stream_output, True
            try:
                answer = await super().send(request)
            finally:
                request.stream_output = is_object
            if is_object and answer.status_code < 300:
                return answer
            body = await _read(answer.raw)
            headers = dict(answer.headers)
            if request.method != "HEAD":  # the header need not be there, or be right
                headers["content-length"] = str(len(body))
            return AioAWSResponse(answer.url, answer.status_code, headers, _Body(body))

    return Session


def _check_proxy(proxy: str | None) -> None:
    """Refuse what aiohttp cannot read: its errors, and Python's, repeat it with the password.

    Raises:
        ConfigError: it is no URL of an HTTP proxy.
    """
    from yarl import URL

    if proxy is None:
        return
    try:
        url = URL(proxy)
        # Python reads more strictly than yarl does in some places.
        is_proxy = url.scheme in ("http", "https") and urlsplit(proxy).port == url.explicit_port
        is_proxy = is_proxy and bool(url.host) and "@" not in url.path
    except ValueError:
        is_proxy = False
    if not is_proxy:
        raise ConfigError(
            "option proxy, or HTTP_PROXY or HTTPS_PROXY",
            "is no URL of an HTTP proxy",
            "write it as http://host:port, and '/', '@' and ':' in a password as %2F, %40 and %3A",
        )


class _NoRedirectSession:
    """One of aiohttp's sessions, which follows no redirects and keeps a proxy's password secret.

    The errors of aiohttp have the proxy's URL as it was given.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, method: str, *, proxy: str | None = None, **arguments: Any) -> Any:
        from yarl import URL

        if proxy is not None:
            url = URL(proxy)
            arguments["proxy"] = url.with_user(None)
            if url.user is not None:
                who = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
                is_plain = arguments["url"].scheme == "http"  # else a tunnel is asked for first
                which = "headers" if is_plain else "proxy_headers"
                given = arguments.get(which) or {}
                arguments[which] = {**given, "Proxy-Authorization": f"Basic {who}"}
        return self._session.request(method, **arguments, allow_redirects=False)


class _Body:
    """A body that has been read."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


async def _read(response: Any) -> bytes:
    body = bytearray()
    async with response:
        while chunk := await response.content.read(_CHUNK_BYTES):
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                response.close()
                raise TransientError(
                    f"more than {_MAX_ANSWER_BYTES} bytes come where S3 would answer briefly; "
                    "check that endpoint_url is an S3 server"
                )
    return bytes(body)


def region_judge(*, is_aws: bool) -> Callable[..., None]:
    """Return a handler for ``needs-retry.s3``, to be called before the one that follows redirects.

    Where a bucket is elsewhere, S3 names its region in a header or in its error, and botocore asks
    there again, signed again, and from then on at once. It believes what it reads: the region of
    another partition, which is another operator (AWS China is), gets the session token and the
    customer's key; and what is no region makes all later requests fail.
    """

    def judge(request_dict: Any, response: Any, operation: Any, **_: Any) -> None:
        if response is None:  # there was no answer
            return
        answer, context = response[1], request_dict["context"]
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        named = headers.get("x-amz-bucket-region"), answer.get("Error", {}).get("Region")
        if all(_is_near(region, context.get("client_region") or "") for region in named if region):
            return
        context.setdefault("s3_redirect", {})["redirected"] = True  # and once is all it may be
        if operation.name == "HeadBucket":  # by which botocore asks for the region, for another
            headers.pop("x-amz-bucket-region", None)

    def _is_near(region: str, own: str) -> bool:
        if not is_aws:
            return _OF_OTHERS.fullmatch(region) is not None
        is_region = _OF_AWS.fullmatch(region) is not None
        return is_region and partition_region(region) == partition_region(own)

    return judge
