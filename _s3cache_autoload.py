"""What ``import torch`` calls at its end where s3cache is installed.

torch finds it through the entry point group ``torch.backends``. Beside the package and not in it:
a process that names no cache imports this file, ``_s3cache_process.py`` and nothing else.
"""

from _s3cache_process import (
    CODE_CACHES,
    COMPILER,
    baseline,
    is_asked,
    note_imports,
    take_baseline,
)


def autoload() -> None:
    """Enable s3cache as the environment has it, once something is compiled. Never raises."""
    try:
        take_baseline()
        note_imports()
    except Exception:  # noqa: BLE001, S110 - of a torch that we do not know: at the first look then
        pass
    try:
        if is_asked():
            _wait()
    except Exception:
        # torch would make an error of the user's program of it.
        import logging

        logging.getLogger("s3cache").warning("not enabled", exc_info=True)


def _wait() -> None:
    """Enable the cache at the first import of torch's compiler, or at a look of the program."""
    from s3cache.seam import features
    from s3cache.util.importing import before_import, first_compile
    from s3cache.util.snapshot import FUNCTIONS

    for names in baseline.values():
        FUNCTIONS.add(names.values())  # takes 20 ms
    # Most processes of a job compile nothing: launchers, workers that load data. They come no
    # further than this, and pay nothing for the rest.
    undo = first_compile.wait(_enable)
    if undo is not None:
        for module in (COMPILER, CODE_CACHES):
            undo.callback(before_import(module, first_compile.end))
        for feature in features():
            undo.callback(feature.call(feature.waits) or (lambda: None))


def _enable() -> None:
    from s3cache.hooks import enable_by_environment

    enable_by_environment()
