"""What the server can do, as far as a store depends on it and nobody but the server can tell.

AWS, MinIO and Ceph RGW honour ``If-None-Match: *`` on a write, and of racing writers one wins.
Others ignore the header or refuse it. OpenStack Swift's s3api honours it, but several of racing
writers win. On CompleteMultipartUpload, all but AWS and MinIO ignore it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from s3cache.store.s3._errors import error_status, refuses_condition

__all__ = ["PROBE_NAME", "ServerProbe"]

#: The name of the object that the server is asked with, under the store's prefix.
PROBE_NAME = ".s3cache-probe"
_TEXT = b"s3cache asks with this object whether the server honours If-None-Match: *\n"

_Condition: TypeAlias = Literal["honoured", "ignored", "assumed"]


class ServerProbe:
    """Asks one server, once, and learns from its answers.

    Args:
        target: what a write of the marker object takes, its key included.

    Attributes:
        is_swift: the server is an OpenStack Swift.
        completes_conditionally: CompleteMultipartUpload honours the condition, too.
    """

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._target = target
        self._condition: _Condition | None = None
        self._asking: asyncio.Task[_Condition] | None = None
        self._asked_with: Any = None
        self.is_swift = False
        self.completes_conditionally = False

    async def honours_condition(self, client: Any) -> bool:
        """Whether the server was seen to honour ``If-None-Match: *`` on a write."""
        return await self._ask(client) == "honoured"

    async def may_honour_condition(self, client: Any) -> bool:
        """The same, but true where it cannot be found out: the write will say what is wrong."""
        try:
            return await self._ask(client) != "ignored"
        except Exception:  # noqa: BLE001 - the write meets it again, if it still is
            return True

    def note_refusal(self) -> None:
        """A write was refused for its condition, whatever the server has said before."""
        self._condition = "ignored"

    def learn(self, response: Mapping[str, Any]) -> None:
        """Take from an answer to a write what its headers tell."""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if "x-openstack-request-id" in headers or "x-trans-id" in headers:
            self.is_swift = True
        server = headers.get("server", "").lower()
        self.completes_conditionally = server.startswith(("amazons3", "minio"))

    async def aclose(self) -> None:
        """Ask no more; whoever waits for the answer is cancelled."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, client: Any) -> _Condition:
        """Ask the server once, however many writers wait; failing to is not remembered.

        A refusal is, until another client comes with other credentials.
        """
        is_outdated = self._condition == "assumed" and client is not self._asked_with
        if self._condition is not None and not is_outdated:
            return self._condition
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._probe(client))
            self._asking.add_done_callback(_mark_as_seen)
        answer = await asyncio.shield(self._asking)
        self._condition, self._asked_with = answer, client
        return answer

    async def _probe(self, client: Any) -> _Condition:
        # The second round tells a server that has just created the marker (412 now) from one
        # that ignores the condition (200 again). Once the marker exists, one round will do.
        for _ in range(2):
            try:
                response = await client.put_object(Body=_TEXT, IfNoneMatch="*", **self._target)
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


def _mark_as_seen(task: asyncio.Task[_Condition]) -> None:
    if not task.cancelled():
        task.exception()
