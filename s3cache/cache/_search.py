"""One lookup: where it looks, in which order, and what it says if it finds nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from s3cache import entries
from s3cache.cache._local import Local
from s3cache.cache._problems import Problems, reason_for
from s3cache.cache._remote import RemoteTier
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import Reason, TierName

__all__ = ["Search"]

_T = TypeVar("_T")


class Search:
    """The search for an entry under ``key`` that ``accept`` accepts; any, if that is ``None``.

    Args:
        remote: the remote tier, if there is one; may raise.
        timeout_s: how long it waits for the remote, all in all.

    Attributes:
        reason: why nothing was found.
        error: the first thing that went wrong, if anything did.
    """

    def __init__(
        self,
        key: str,
        accept: Callable[[Frame], bool] | None,
        *,
        local: Local,
        remote: Callable[[], RemoteTier | None],
        problems: Problems,
        timeout_s: float,
    ) -> None:
        self._key = key
        self._accept = accept
        self._local = local
        self._remote = remote
        self._problems = problems
        self._deadline = time.monotonic() + timeout_s
        self._first = entries.first_name(key)
        self._has_first = False  # here, on this machine
        self._variants: set[str] = set()  # yielded so far
        self.reason = Reason.ABSENT
        self.error: Exception | None = None
        self._last_error: Exception | None = None

    def run(self) -> tuple[Frame, TierName] | None:
        """The entry and the tier that had it. Raises nothing, unless strict."""
        for entry, tier in self.candidates():
            # The caller's judgement may fail too: that is no reason to end its program here.
            if self._accept is None or self._guard(partial(self._accept, entry)):
                return entry, tier
        return None

    def candidates(self) -> Iterator[tuple[Frame, TierName]]:
        """Verified entries under the key, each variant once, the cheapest to get first."""
        # Most entries have one of these two names; a directory is only read for the others.
        tried = [self._first, entries.variant_name(self._key, "")]
        for name in tried:
            yield from self._try_local(name)
        for name in self._guard(partial(self._local.names, self._key)) or ():
            if name not in tried:
                yield from self._try_local(name)
        remote = self._guard(self._remote)
        if remote is not None:
            yield from self._remote_candidates(remote)

    def _remote_candidates(self, remote: RemoteTier) -> Iterator[tuple[Frame, TierName]]:
        def load(name: str) -> Frame | None:
            return remote.downloads.get(name, self._left_s())

        if not self._has_first and self._guard(partial(self._local.holds, self._first)):
            yield from self._try_local(self._first)  # somebody else's download has landed
        if not self._has_first:
            self._last_error = None
            first = self._guard(partial(load, self._first))
            if first is not None:
                yield from self._offer("remote", first)
            elif not isinstance(self._last_error, CorruptError):
                return  # it is absent, and the others with it, or the remote does not answer
        for name in self._guard(lambda: remote.variants(self._key, self._left_s())) or ():
            # What this machine has under that name has been offered already.
            if name not in map(self._name_of, self._variants):
                entry = self._guard(partial(load, name))
                if entry is not None:
                    yield from self._offer("remote", entry)

    def _try_local(self, name: str) -> Iterator[tuple[Frame, TierName]]:
        entry = self._guard(partial(self._local.load, name))
        if entry is not None:
            self._has_first |= name == self._first
            yield from self._offer("local", entry)

    def _name_of(self, variant: str) -> str:
        return entries.variant_name(self._key, variant)

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _offer(self, tier: TierName, entry: Frame) -> Iterator[tuple[Frame, TierName]]:
        if entry.header.variant not in self._variants:
            self._variants.add(entry.header.variant)
            if self.error is None:
                self.reason = Reason.GUARD  # unless the caller takes it
            yield entry, tier

    def _guard(self, call: Callable[[], _T]) -> _T | None:
        """The result of ``call``, or ``None`` and the reason kept if it fails."""
        try:
            return call()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("lookup", "a lookup failed, which is a miss", exc)
            self._last_error = exc
            if self.error is None:
                self.error, self.reason = exc, reason_for(exc)
            return None
