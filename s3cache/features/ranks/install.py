"""Let ranks agree where they must, and bound their compile workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from s3cache.features.ranks import MISSED
from s3cache.util.importing import when_imported

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.errors import Reason
    from s3cache.features.ranks.agreement import Agreement
    from s3cache.hooks import Lookup, Session


def install(session: Session) -> None:
    """Agree on lookups of whole graphs. The events are announced only if ranks must agree."""
    agreements: dict[Lookup, Agreement] = {}

    @contextlib.contextmanager
    def looking_up(lookup: Lookup, gm: GraphModule, inputs: Sequence[object]) -> Iterator[None]:
        from s3cache.features.ranks.agreement import agreement_on

        agreement = agreements[lookup] = agreement_on(gm, inputs)
        try:
            yield
        finally:
            del agreements[lookup]
            agreement.close()

    def barred(lookup: Lookup) -> Reason | None:
        agreement = agreements.get(lookup)  # there is none for an FX graph
        return None if agreement is not None and agreement.all_hit() else MISSED

    session.events.looking_up.subscribe(looking_up)
    session.events.barred.subscribe(barred)
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        _bound_workers(session)


def _bound_workers(session: Session) -> None:
    from s3cache.features.ranks import names
    from s3cache.features.ranks.agreement import bounded_workers

    def bound() -> None:
        session.install_part(
            names.FEATURE,
            lambda patches: patches.wrap(names.compile_threads, bounded_workers),
            bind=False,
        )

    session.undo.callback(when_imported(names.ASYNC_COMPILE, bound))
