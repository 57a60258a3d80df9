"""A server before an S3 server: it refuses some methods, as narrow rights do, and passes others."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Refusing"]

_DENIED = b"<Error><Code>AccessDenied</Code><Message>not your right</Message></Error>"
_HOP = ("connection", "transfer-encoding", "server", "date", "content-length")


class Refusing:
    """Listens at ``port``; ``methods`` are answered with 403, and may change."""

    def __init__(self, behind: int, *methods: str) -> None:
        self.methods = {*methods}
        refusing = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.command in refusing.methods:
                    self._send(403, {"content-type": "application/xml"}, _DENIED)
                    return
                connection = http.client.HTTPConnection("127.0.0.1", behind, timeout=30)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    headers = {
                        name: value
                        for name, value in answer.getheaders()
                        if name.lower() not in _HOP
                    }
                    length = answer.getheader("content-length")
                    self._send(answer.status, headers, answer.read(), length)
                finally:
                    connection.close()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - of the library

            def _send(
                self, status: int, headers: dict[str, str], body: bytes, length: str | None = None
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                is_head = self.command == "HEAD"
                self.send_header("content-length", length if is_head and length else str(len(body)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
