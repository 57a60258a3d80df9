"""Types for calling a command, and a helper that saves an entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from s3cache import Cache, frame


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The only value on standard output."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The values on standard output, one to a line."""
        return [json.loads(line) for line in self.out.splitlines()]


#: Calls a command with these arguments, in this process.
Call = Callable[..., Done]


def save(url: str | None, key: str = "k", **options: Any) -> None:
    """Save an entry on this machine, and upload it if possible."""
    with Cache.open(url, **options) as cache:
        cache.save(key, frame.encode(kind="test", key=key, sections={"s": b"abc"}))
