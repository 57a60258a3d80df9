"""A gate in front of an S3 server: it forwards requests, or answers them itself."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from tests.support.waiting import LONG_S

#: Status, headers and body.
Answer: TypeAlias = "tuple[int, dict[str, str], bytes]"
Rule: TypeAlias = "Callable[[str, str, Mapping[str, str]], Answer | None]"

_HOP = {"connection", "content-length", "transfer-encoding", "date", "server"}


def refusal(status: int, code: str) -> Answer:
    """Return the answer of S3 to a request that it refuses."""
    text = f"<Error><Code>{code}</Code><Message>as told</Message></Error>"
    return status, {"Content-Type": "application/xml"}, text.encode()


def refusing(*methods: str) -> Rule:
    """Return a rule that refuses some methods, as for a role with few permissions."""
    return lambda method, *_: refusal(403, "AccessDenied") if method in methods else None


class Gate:
    """A gate on its own threads, between clients and the server on ``server_port``.

    Attributes:
        rule: called with the method, the target and the headers of each request; returns the
            answer, or ``None`` to forward the request to the server.
    """

    def __init__(self, server_port: int) -> None:
        self.open()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = dict(self.headers.items())
                answer = gate.rule(self.command, self.path, headers) or self._ask(body)
                status, headers, content = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def _ask(self, body: bytes) -> Answer:
                server = http.client.HTTPConnection("127.0.0.1", server_port, timeout=LONG_S)
                try:
                    server.request(self.command, self.path, body, dict(self.headers.items()))
                    answer = server.getresponse()
                    content = answer.read()
                    drop = _HOP - ({"content-length"} if self.command == "HEAD" else set())
                    kept = {k: v for k, v in answer.getheaders() if k.lower() not in drop}
                    return answer.status, kept, content
                finally:
                    server.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Gate:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def open(self) -> None:
        """Forward all requests."""
        self.rule: Rule = lambda method, target, headers: None
