"""Wait for the imports that can do less."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from _s3cache_process import COMPILER
from s3cache.util.importing import when_imported, without_collections

if TYPE_CHECKING:
    from s3cache.hooks import Session

#: Modules that import much of torch.
_HEAVY = "torch", "torch._dynamo", "torch._dynamo.repro.after_dynamo", COMPILER
#: Modules that rarely use networkx. Its import takes a tenth of a second.
_NETWORKX_USERS = tuple(
    f"torch._functorch._activation_checkpointing.{name}"
    for name in ("graph_info_provider", "knapsack_evaluator")
)


def avoid_collections() -> Callable[[], None]:
    """Import heavy modules without garbage collections; return a function that ends this."""
    return without_collections(_HEAVY)


def install(session: Session) -> None:
    """Defer what can be deferred."""
    from s3cache.features.startup._later import import_later
    from s3cache.features.startup._templates import parse_templates_later

    cancel = avoid_collections()
    session.undo.callback(cancel)
    session.undo.callback(when_imported(COMPILER, cancel))  # few are left by then
    session.undo.callback(parse_templates_later())
    for importer in _NETWORKX_USERS:
        session.undo.callback(import_later(importer, "networkx"))
