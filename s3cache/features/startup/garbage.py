"""Imports without garbage collections.

An import of a large module makes many permanent objects, and each collection would go through them.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import Loader
from types import ModuleType

from _s3cache_process import COMPILER
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
        with _no_collections():
            execute(module)

    loader.exec_module = execute_quietly  # type: ignore[method-assign]


# A threshold that few imports reach, and that we recognize as ours. If a program reads it
# meanwhile, in any thread, and sets it again later, there are still collections. gc.disable() would
# not work: if a program calls it meanwhile, we would undo it.
_FAR = 1_000_003
_usual = 0  # the program's threshold, while ours is set
_FEW = 1_000  # Python 3.12 itself freezes 375 objects; a program that does freezes many more


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    global _usual
    threshold = gc.get_threshold()[0]
    if not (0 < threshold < _FAR and gc.isenabled()):  # no collections; or a nested import
        yield
        return
    gc.collect(1)  # do not keep existing garbage with the new objects
    _usual = threshold
    try:
        gc.set_threshold(_FAR)
        yield
    finally:
        try:
            if gc.get_freeze_count() < _FEW:  # else the program has frozen objects
                # To the oldest generation: a collection of the youngest would go through it all.
                gc.freeze()
                gc.unfreeze()
        finally:
            _collect_as_usual()


def _collect_as_usual() -> None:
    if gc.get_threshold()[0] == _FAR:  # else the program has set its own
        gc.set_threshold(_usual)


os.register_at_fork(after_in_child=_collect_as_usual)  # the child may lack the importing thread
