"""Claims of the graphs that torch compiles, at both levels."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache.errors import S3CacheError
from s3cache.features.single_flight import _names
from s3cache.features.single_flight.begin import SingleFlight, retry_after
from s3cache.records import Event
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from s3cache.cache import Retry
    from s3cache.features.single_flight.claims import Claim
    from s3cache.frame import Frame
    from s3cache.hooks import Lookup, Save, Session

logger = logger_of("lookups")


@dataclass(eq=False)
class CompileClaim:
    """One compile of a graph, at either level, for which other processes may wait.

    Attributes:
        claim: the claim that this process holds and others wait for.
        key: of the graph.
        began: when the claim was taken, on the monotonic clock.
        is_published: whether the others can use the entry.
    """

    claim: Claim | None = None
    key: str = ""
    began: float = 0.0
    is_published: bool = False


class _OfThread(threading.local):
    """The claims of a thread: of the current compile, and all that it holds."""

    def __init__(self) -> None:
        self.current: CompileClaim | None = None
        self.held: list[CompileClaim] = []


class CompileClaims:
    """The claims of graphs that torch compiles."""

    def __init__(self, session: Session) -> None:
        self._engine, self._state = session.engine, session.state
        self._of_thread = _OfThread()
        self.lowers_eagerly = False  # whether a backward is lowered with its forward

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Let lookups in the block claim missing entries; end the claims after it.

        The entry of a graph that Dynamo compiles is saved with its frame.
        """
        thread = self._of_thread
        outer, frame = thread.current, self._state.frame
        if outer is not None and outer.claim is not None:
            yield  # a nested graph: the outer claim covers both
            return
        thread.current = current = CompileClaim()
        try:
            yield
        finally:
            thread.current = outer
            if frame is None:
                self._end(current)
            elif current.claim is not None:
                frame.ends.append(partial(self._end, current))

    def missed(self, lookup: Lookup) -> Retry | None:
        """Claim a graph, or wait for the process that compiles it."""
        current, held = self._of_thread.current, self._of_thread.held
        # A process with a claim does not wait; nor does a rank that must answer other ranks.
        if current is None or held or internals.compiles_exchange():
            return None
        if lookup.level.name == "aot" and not self._is_saved_at_once(lookup):
            return None
        flight = cast("SingleFlight | None", self._engine.parts["single_flight"])
        key = str(lookup.key)
        outcome = None if flight is None else flight.claim(key, group_timeout_s() / 3)
        if outcome is None:
            return None
        if outcome.claim is not None:
            current.claim, current.key, current.began = outcome.claim, key, time.monotonic()
            held.append(current)
        if outcome.timed_out:
            logger.warning(
                "%s has compiled a graph for more than %.0f s; this process compiles it too %s",
                outcome.holder, outcome.seconds, pointer("waited"),
            )  # fmt: skip
        return retry_after(outcome)

    def _is_saved_at_once(self, lookup: Lookup) -> bool:
        """Return whether a missing graph is saved as a whole before the program goes on.

        A graph with a backward is, if the backward is lowered with the forward.
        """
        if internals.sync_lookups.find():  # after a lookup, ranks exchange data
            return False
        if not _needs_backward(lookup.inputs):
            return True
        return self.lowers_eagerly and not _names.compiled_autograd.get()

    def hit(self, lookup: Lookup, *_: object) -> None:
        """Let others go on before this process has loaded the entry."""
        if (current := self.held(lookup.key)) is not None:
            current.is_published = True
            self._release(current)

    def saved(self, saving: Save, _: Frame, is_saved: bool) -> None:
        """Note whether others can use the saved entry: not if it serves this rank alone."""
        if is_saved and (current := self.held(saving.key)) is not None:
            current.is_published = not saving.limits.relied

    def is_awaited(self, saving: Save) -> bool | None:
        """Return whether other machines wait for an entry."""
        current = self.held(saving.key)
        claim = None if current is None else current.claim
        return True if claim is not None and claim.end_lease is not None else None

    def held(self, key: str | None) -> CompileClaim | None:
        """Return the claim of a key that this thread holds."""
        return next((each for each in self._of_thread.held if each.key == key), None)

    def _end(self, current: CompileClaim) -> None:
        """Count and record the compile under a claim, and release the claim."""
        if current.claim is not None:
            seconds = time.monotonic() - current.began
            self._engine.counts["single_flight"].count("claimed")
            self._engine.record(Event("claim", time.time(), seconds, current.key))
        self._release(current)

    def _release(self, current: CompileClaim) -> None:
        """Let others go on. If the disk fails, they go on when their wait ends."""
        claim, current.claim = current.claim, None
        if claim is not None:
            self._of_thread.held.remove(current)
            with contextlib.suppress(S3CacheError):
                claim.release(published=current.is_published)


def _needs_backward(inputs: Sequence[object]) -> bool:
    """Return whether torch makes a backward for a graph, judging by its inputs."""
    import torch

    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
    )


def group_timeout_s() -> float:
    """Return the timeout of ranks of this job for each other; infinity outside of a job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return math.inf
    return float(internals.default_store.get()().timeout.total_seconds())
