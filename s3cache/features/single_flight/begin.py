"""Claim entries for one process, or wait for the process that has claimed them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from s3cache.errors import TransientError
from s3cache.features.single_flight import SingleFlightOptions
from s3cache.records import Event
from s3cache.util.logs import Problems
from s3cache.util.threads import is_forked

if TYPE_CHECKING:
    from s3cache.cache import Engine
    from s3cache.features.single_flight.claims import Claim, Claims, WaitOutcome
    from s3cache.features.single_flight.leases import Leases

# How long the requests for a lease may take, besides waiting for other machines.
_LEASE_S = 30.0


class SingleFlight:
    """The claims and leases of one process, for all kinds of entries."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._options = engine.settings.of(SingleFlightOptions)
        self._counts = engine.counts["single_flight"]
        self._problems = Problems(strict=engine.settings.strict)
        self._claims: Claims | None = None
        self._leases: Leases | None = None
        engine.events.missed.subscribe(
            lambda key, kind, bound_s: (
                None if (it := self.claim(key, bound_s, kind)) is None else it.retry()
            )
        )

    def claim(self, key: str, bound_s: float, kind: str = "fx") -> WaitOutcome | None:
        """Claim a compile by the key of its entry, or wait until another process has done it.

        Return None if processes share nothing, or if the disk fails. Only kind ``fx`` is leased,
        which stands for graphs of both levels.
        """
        local, bound_s = self._engine.local, min(self._options.wait_s, bound_s)
        is_shared = local.is_writable and self._engine.settings.mode == "read-write"
        if local.disk is None or not (is_shared and bound_s):
            return None
        if self._claims is None:
            from s3cache.features.single_flight.claims import Claims

            self._claims = Claims(local.disk)
        claims = self._claims
        outcome = local.read(lambda _: claims.take(key, bound_s), None)
        if outcome is None:
            return None
        if outcome.claim is not None and not outcome.holder and kind == "fx":
            outcome = self._lease(claims, outcome.claim, key, bound_s)
        if outcome.holder:
            label = "" if kind == "fx" else kind
            self._counts.count("waits", label)
            self._counts.count("waited_s", label, outcome.seconds)
            how = f"{'too long ' if outcome.timed_out else ''}for {outcome.holder}"
            self._engine.record(Event("wait", time.time(), outcome.seconds, key, ended=how))
        return outcome

    def _lease(self, claims: Claims, claim: Claim, key: str, bound_s: float) -> WaitOutcome:
        """Compete with other machines for a key that this process has claimed.

        Waits that give no entry take at most ``bound_s`` together, over all keys and processes of
        this machine: a writer of the bucket can plant leases.
        """
        from s3cache.features.single_flight.claims import WaitOutcome

        asked = self._options.leases
        ranks, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        remote = None
        if asked == "on" or (asked == "auto" and ranks != here):
            remote = self._engine.remote()
        if remote is None or is_forked():  # a fork may hang, and would renew its lease nevertheless
            return WaitOutcome(claim)
        try:
            wasted_s = claims.wasted_s()
            if wasted_s >= bound_s:
                problem = f"{wasted_s} s of waiting for leases gave no entry"
                raise TransientError(problem, op="lease")
            bound_s -= wasted_s
            if self._leases is None:
                from s3cache.features.single_flight.leases import Leases, me

                self._leases = Leases(remote.reader, me())
                remote.at_stop.append(self._leases.stop)
            is_published = partial(remote.has_entry, key)
            taking = self._leases.take(key, is_published, bound_s)
            leased = remote.loop.wait(taking, bound_s + _LEASE_S)
        except Exception as exc:  # noqa: BLE001 - then this machine does not wait for others
            self._problems.raise_or_warn("lease", "no machine waits for another one now", exc)
            return WaitOutcome(claim)
        if (lease := leased.lease) is not None:

            def end_lease(published: bool) -> None:
                remote.begin(lambda: lease.end(is_published if published else None))

            claim.end_lease = end_lease
            if lease.taken_over:
                self._counts.count("taken_over")
        waste = partial(claims.waste, leased.seconds) if leased.seconds else None
        return replace(leased, claim=claim, waste=waste)
