"""Let ranks agree where they must, and bound their compile workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from s3cache.errors import Reason
from s3cache.torch_api import internals
from s3cache.util.importing import when_imported

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.features.ranks.agreement import Agreement
    from s3cache.hooks import Lookup, Session


def install(session: Session) -> None:
    """Agree on lookups of whole graphs: nothing is done where ranks exchange no data."""
    agreements: dict[Lookup, Agreement] = {}

    def looking_up(
        lookup: Lookup, gm: GraphModule, inputs: Sequence[object]
    ) -> contextlib.AbstractContextManager[object]:
        is_needed = internals.hits_need_agreement()
        return agreeing(lookup, gm, inputs) if is_needed else contextlib.nullcontext()

    @contextlib.contextmanager
    def agreeing(lookup: Lookup, gm: GraphModule, inputs: Sequence[object]) -> Iterator[None]:
        from s3cache.features.ranks.agreement import agreement_on

        agreement = agreements[lookup] = agreement_on(gm, inputs)
        try:
            yield
        finally:
            del agreements[lookup]
            agreement.close()

    def barred(lookup: Lookup) -> Reason | None:
        agreement = agreements.get(lookup)
        if agreement is None:  # ranks agree on whole graphs only
            return Reason.RANKS if internals.hits_need_agreement() else None
        return None if agreement.all_hit() else Reason.RANKS

    session.events.looking_up.subscribe(looking_up)
    session.events.barred.subscribe(barred)
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        _bound_workers(session)


def _bound_workers(session: Session) -> None:
    from s3cache.features.ranks import _names
    from s3cache.features.ranks.agreement import bounded_workers

    def bound() -> None:
        session.install_part(
            _names.FEATURE,
            lambda patches: patches.wrap(_names.compile_threads, bounded_workers),
            bind=False,
        )

    session.undo.callback(when_imported(_names.ASYNC_COMPILE, bound))
