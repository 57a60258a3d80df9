"""Imports without garbage collections.

An import of a large module makes many permanent objects, and each collection would go through them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from importlib.abc import Loader
from types import ModuleType

from _s3cache_process import COMPILER
from s3cache.util.garbage import no_collections
from s3cache.util.importing import when_found

#: Modules that import much of torch.
_HEAVY = "torch", "torch._dynamo", "torch._dynamo.repro.after_dynamo", COMPILER


def without_collections(names: Iterable[str] = _HEAVY) -> Callable[[], None]:
    """Avoid garbage collections during the imports of modules.

    Returns a function that cancels this for modules that are not imported yet.
    """
    undo = contextlib.ExitStack()
    for name in names:
        undo.callback(when_found(name, _collect_less))
    return undo.close


def _collect_less(loader: Loader) -> None:
    execute = loader.exec_module

    def execute_quietly(module: ModuleType) -> None:
        with no_collections():
            execute(module)

    loader.exec_module = execute_quietly  # type: ignore[method-assign]
