"""Claim the graphs that torch compiles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from s3cache.features.single_flight import _names
from s3cache.features.single_flight.compiles import CompileClaims
from s3cache.torch_api import internals
from s3cache.util.importing import when_imported

if TYPE_CHECKING:
    from s3cache.hooks import Patches, Session


def install(session: Session) -> None:
    """Claim what is missed, and end each claim with its compile."""
    claims, events = CompileClaims(session), session.events
    events.compiling.subscribe(claims.compiling)
    events.missed.subscribe(claims.missed)
    events.hit.subscribe(claims.hit)
    events.saved.subscribe(claims.saved)
    events.is_awaited.subscribe(claims.is_awaited)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return

    def lower_eagerly(patches: Patches) -> None:
        from s3cache.features.single_flight.eager_backward import EagerBackward

        patches.install(EagerBackward(session, claims))
        patches.callback(setattr, claims, "lowers_eagerly", False)
        claims.lowers_eagerly = True

    session.undo.callback(
        when_imported(
            internals.COMPILER, lambda: session.install_part(_names.FEATURE, lower_eagerly)
        )
    )
