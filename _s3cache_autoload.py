"""Enable s3cache at the end of ``import torch``, in environments where it is installed.

torch finds :func:`autoload` in the entry point group ``torch.backends``. This file is beside the
package, not in it: a process without a cache imports it and ``_s3cache_process.py``, nothing else.
"""

from _s3cache_process import (
    CODE_CACHES,
    COMPILER,
    copies,
    is_asked,
    note_imports,
    take_baseline,
)


def autoload() -> None:
    """Enable the cache that the environment names, when something is first compiled.

    Never raises: torch would turn an error here into an error of the user's program.
    """
    try:
        take_baseline()
        note_imports()
    except Exception:  # noqa: BLE001, S110 - an unknown torch: enabling the cache tries it again
        pass
    try:
        if is_asked():
            _wait_for_compile()
    except Exception:
        import logging

        logging.getLogger("s3cache").warning("not enabled", exc_info=True)


def _wait_for_compile() -> None:
    """Enable the cache when torch's compiler is first imported, or a feature needs it earlier."""
    from s3cache.seam import features
    from s3cache.util.importing import before_import, first_compile
    from s3cache.util.snapshot import FUNCTIONS

    for copy in copies.values():
        FUNCTIONS.add(copy.content.values())  # takes 20 ms
    # Most processes of a job compile nothing, such as launchers and workers that load data. They
    # stop here, and do not pay for the rest.
    undo = first_compile.wait(_enable)
    if undo is not None:
        for module in (COMPILER, CODE_CACHES):
            undo.callback(before_import(module, first_compile.end))
        for feature in features():
            undo.callback(feature.call(feature.waits) or (lambda: None))


def _enable() -> None:
    from s3cache.hooks import enable_by_environment

    enable_by_environment()
