"""Claims of the graphs that torch compiles, at both levels."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache.errors import S3CacheError
from s3cache.features.single_flight import names
from s3cache.records import Event
from s3cache.torch_api import internals
from s3cache.util.importing import when_imported
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from s3cache.cache import Retry
    from s3cache.features.single_flight.begin import SingleFlight
    from s3cache.features.single_flight.claims import Claim
    from s3cache.frame import Frame
    from s3cache.hooks import Lookup, Patches, Save, Session

logger = logger_of("lookups")


def install(session: Session) -> None:
    """Claim what is missed, and end each claim with its compile."""
    claims = CompileClaims(session)
    session.events.missed.subscribe(claims.missed)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return

    def lower_eagerly(patches: Patches) -> None:
        from s3cache.features.single_flight.eager_backward import EagerBackward

        patches.install(EagerBackward(session, lambda key: claims.held(key) is not None))
        patches.callback(setattr, claims, "lowers_eagerly", False)
        claims.lowers_eagerly = True

    session.undo.callback(
        when_imported(
            internals.COMPILER, lambda: session.install_part(names.FEATURE, lower_eagerly)
        )
    )


class _OfThread(threading.local):
    claim: Claim | None = None


class CompileClaims:
    """The claims of graphs that torch compiles: at most one for each thread.

    A process with a claim does not wait, so nested graphs have none: the outer claim covers them.
    """

    def __init__(self, session: Session) -> None:
        self._engine, self._state, self._events = session.engine, session.state, session.events
        self._thread = _OfThread()
        self._has_claimed = False
        self.lowers_eagerly = False  # whether a backward is lowered with its forward

    def missed(self, lookup: Lookup) -> Retry | None:
        """Claim a graph, or wait for the process that compiles it."""
        at_end = self._state.at_end
        # A process with a claim does not wait; nor does a rank that must answer other ranks.
        if at_end is None or self._thread.claim is not None or internals.compiles_exchange():
            return None
        if lookup.level.name == "aot" and not self._is_saved_at_once(lookup):
            return None
        flight = cast("SingleFlight | None", self._engine.parts["single_flight"])
        bound_s = group_timeout_s() / 3
        outcome = None if flight is None else flight.claim(str(lookup.key), bound_s)
        if outcome is None:
            return None
        if (claim := outcome.claim) is not None:
            if not self._has_claimed:  # programs that only hit do not come here
                self._has_claimed = True
                self._events.hit.subscribe(self._hit)
                self._events.saved.subscribe(self._saved)
                self._events.is_awaited.subscribe(self._is_awaited)
            self._thread.claim, claim.began = claim, time.monotonic()
            # The entry of a graph that Dynamo compiles is saved with its frame.
            at_end(partial(self._end, claim))
        if outcome.timed_out:
            logger.warning(
                "%s has compiled a graph for more than %.0f s; this process compiles it too %s",
                outcome.holder, outcome.seconds, pointer("waited"),
            )  # fmt: skip
        return outcome.retry()

    def _is_saved_at_once(self, lookup: Lookup) -> bool:
        """Return whether a missing graph is saved as a whole before the program goes on.

        A graph with a backward is, if the backward is lowered with the forward.
        """
        if internals.sync_lookups.find():  # after a lookup, ranks exchange data
            return False
        import torch

        needs_backward = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in lookup.inputs
        )
        return not needs_backward or (self.lowers_eagerly and not names.compiled_autograd.get())

    def _hit(self, lookup: Lookup, *_: object) -> None:
        """Let others go on before this process has loaded the entry."""
        if (current := self.held(lookup.key)) is not None:
            self._release(current, is_published=True)

    def _saved(self, saving: Save, _: Frame, is_saved: bool) -> None:
        """Note whether others can use the saved entry: not if it serves this rank alone."""
        if is_saved and (current := self.held(saving.key)) is not None:
            current.is_published = not saving.limits.relied

    def _is_awaited(self, saving: Save) -> bool | None:
        """Return whether other machines wait for an entry."""
        current = self.held(saving.key)
        return None if current is None or current.end_lease is None else True

    def held(self, key: str | None) -> Claim | None:
        """Return the claim of a key that this thread holds."""
        current = self._thread.claim
        return current if current is not None and current.key == key else None

    def _end(self, current: Claim) -> None:
        """Count and record the compile under a claim, and release the claim."""
        if self._thread.claim is current:  # no entry was found under it
            seconds = time.monotonic() - current.began
            self._engine.counts["single_flight"].count("claimed")
            self._engine.record(Event("claim", time.time(), seconds, current.key))
            self._release(current, is_published=current.is_published)

    def _release(self, current: Claim, *, is_published: bool) -> None:
        """Let others go on. If the disk fails, they go on when their wait ends."""
        self._thread.claim = None
        with contextlib.suppress(S3CacheError):
            current.release(published=is_published)


def group_timeout_s() -> float:
    """Return the timeout of ranks of this job for each other; infinity outside of a job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return math.inf
    return float(internals.default_store.get()().timeout.total_seconds())
