"""The nearest entries of a remote, by the hints that lie beside them."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING

from s3cache import hints
from s3cache.errors import S3CacheError
from s3cache.explaining._differences import Described
from s3cache.explaining._nearest import Known
from s3cache.records import Record

if TYPE_CHECKING:
    from s3cache.settings import Options

__all__ = ["Hinted"]

# For all misses of a run together.
_ASKED_AT_MOST = 32
_TIMEOUT_S = 20.0


class Hinted:
    """Asks a remote, until it fails once.

    Args:
        url: of the remote; ``None`` to ask nobody.

    Attributes:
        problem: why it could not be asked.
    """

    def __init__(self, options: Options, url: str | None) -> None:
        self._options: Options = {**options}
        self._url = url
        self._asked = 0
        self.problem = ""

    def near(self, missed: Record) -> list[Known]:
        """The entry that is nearest to what missed, if hints lead to one."""
        if self._url is None or self.problem or self._asked >= _ASKED_AT_MOST:
            return []
        self._asked += 1
        try:
            hint = self._ask(self._url, missed)
        except (S3CacheError, asyncio.TimeoutError, concurrent.futures.TimeoutError) as exc:
            self.problem = str(exc) or f"no answer within {_TIMEOUT_S:g} s"
            return []
        if hint is None:
            return []
        described = Described(hint.components, hint.parts)
        where = "the remote, unverified"
        return [Known(hint.key, missed.level, described, where, hint.created)]

    def _ask(self, url: str, missed: Record) -> hints.Hint | None:
        from s3cache.catalog import open_place
        from s3cache.transfer import background

        with open_place(url, **self._options) as place:
            asking = hints.find(place.store, missed.components, missed.key)
            return background().wait(asyncio.wait_for(asking, _TIMEOUT_S), _TIMEOUT_S + 5)
