"""S3 may send a request on to another region of its own, in the same partition; no server else.

Here S3 is a proxy that ends the tunnels to it, and notes for which server each was.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from s3cache.errors import PermanentError
from s3cache.store import S3Options, S3Store

HOME = "bucket.s3.eu-west-1.amazonaws.com"
SERVERS = [HOME, "bucket.s3.eu-central-1.amazonaws.com", "*.amazonaws.com.cn"]
FOUND = (
    b'HTTP/1.1 206 Partial\r\netag: "e"\r\ncontent-range: bytes 0-2/3\r\ncontent-length: 3\r\n\r\n'
    b"abc"
)


class S3:
    """Answers what ``answer`` says to the head of a request, whichever server is asked."""

    def __init__(self, directory: Path) -> None:
        self.asked: list[str] = []  # servers, as tunnels to them were asked for
        self.heads: list[str] = []
        self.answer: Callable[[str], bytes] = lambda head: FOUND
        self.certificate = directory / "certificate.pem"
        self._tls = self._certify(directory / "key.pem")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.proxy = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._serving = threading.Thread(target=self._serve)
        self._serving.start()

    def _certify(self, key: Path) -> ssl.SSLContext:
        names = ",".join(f"DNS:{server}" for server in SERVERS)
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=S3"]
        command += ["-addext", f"subjectAltName={names}", "-keyout", str(key)]
        subprocess.run([*command, "-out", str(self.certificate)], capture_output=True, check=True)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.certificate, key)
        return tls

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                with suppress(OSError):
                    self._tunnel(connection)

    def _tunnel(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(20)
            method, target, *_ = _head(connection).split(" ")
            self.asked.append(f"{method} {target}")
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with self._tls.wrap_socket(connection, server_side=True) as inner:
                head = _head(inner)
                self.heads.append(head)
                answer = self.answer(head)
                inner.sendall(answer.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))

    def stop(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._serving.join()


def _head(connection: socket.socket) -> str:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := connection.recv(1)):
            raise ConnectionResetError
        head += byte
    return head.decode("latin-1")


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    s3 = S3(tmp_path)
    yield s3
    s3.stop()


def options(s3: S3) -> S3Options:
    return S3Options(
        "bucket",
        region="eu-west-1",
        access_key="testing",
        secret_key="testing-secret",
        session_token="token",
        proxy=s3.proxy,
        ca_bundle=str(s3.certificate),
    )


def by_header(region: str, head: str) -> bytes:
    return answered("301 Moved", {"x-amz-bucket-region": region}, "PermanentRedirect")


def by_error(region: str, head: str) -> bytes:
    return answered("400 Bad", {}, "AuthorizationHeaderMalformed", f"<Region>{region}</Region>")


def by_head_of_bucket(region: str, head: str) -> bytes:
    if head.startswith("HEAD"):
        return answered("301 Moved", {"x-amz-bucket-region": region}, "")
    return answered("301 Moved", {}, "PermanentRedirect")


def answered(status: str, headers: dict[str, str], code: str, more: str = "") -> bytes:
    body = f"<Error><Code>{code}</Code>{more}</Error>".encode() if code else b""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


WAYS: dict[str, Callable[[str, str], bytes]] = {
    "header": by_header,
    "error": by_error,
    "HEAD of the bucket": by_head_of_bucket,
}
REFUSED = {
    "another partition": "cn-north-1",
    "a domain": "us-east-1.evil.com",
    "a path": "evil.com/",
    "a/c by NFKC": "evil.com\u2100",
    "too long": "x" * 64,
}


@pytest.mark.parametrize("way", WAYS)
async def test_another_region_of_the_partition_is_asked(way: str, s3: S3) -> None:
    def answer(head: str) -> bytes:
        if "/eu-central-1/" in head:
            return FOUND
        return WAYS[way]("eu-central-1", head)

    s3.answer = answer
    store = S3Store(options(s3))
    try:
        assert await store.get("k") == b"abc"
        assert s3.asked[-1] == "CONNECT bucket.s3.eu-central-1.amazonaws.com:443"
        asked = len(s3.asked)
        assert await store.get("k") == b"abc"
        assert s3.asked[asked:] == s3.asked[-1:]  # at once
    finally:
        await store.aclose()


@pytest.mark.parametrize(
    ("way", "region"), [*zip([*WAYS] * 3, REFUSED.values(), strict=False)], ids=REFUSED
)
async def test_no_other_server_is_asked_and_nothing_is_remembered(
    way: str, region: str, s3: S3
) -> None:
    s3.answer = lambda head: WAYS[way](region, head)
    store = S3Store(options(s3))
    try:
        with pytest.raises(PermanentError, match=r"region|elsewhere"):
            await store.get("k")
        assert set(s3.asked) == {f"CONNECT {HOME}:443"}
        s3.answer = lambda head: FOUND
        assert await store.get("k") == b"abc"
        assert set(s3.asked) == {f"CONNECT {HOME}:443"}
        assert all("/eu-west-1/s3/" in head for head in s3.heads)
    finally:
        await store.aclose()
