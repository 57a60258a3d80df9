"""What ``import torch`` calls at its end where s3cache is installed.

torch finds it through the entry point group ``torch.backends``. Beside the package and not in it:
a process that names no cache imports this file and nothing else.
"""

import os

_WORDS = {"": None, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def autoload() -> None:
    """Enable s3cache as the environment has it, once something is compiled. Never raises.

    ``S3CACHE_URL`` asks for it; ``S3CACHE_AUTOLOAD`` turns it off, or on without a URL.
    """
    switch = os.environ.get("S3CACHE_AUTOLOAD", "").lower()
    wanted = _WORDS.get(switch, False)
    if switch in _WORDS and not (os.environ.get("S3CACHE_URL") if wanted is None else wanted):
        return
    import logging

    logger = logging.getLogger("s3cache")
    if switch not in _WORDS:
        logger.warning(
            "s3cache: not enabled: environment variable S3CACHE_AUTOLOAD: "
            "%r is no truth value: use true or false",
            switch,
        )
        return
    try:
        from s3cache._autoload import wait_for_compiler

        wait_for_compiler(_enable)
    except Exception:
        # torch would make an error of the user's program of it.
        logger.warning("s3cache: not enabled", exc_info=True)


def _enable() -> None:
    from s3cache.hooks import enable_by_environment

    enable_by_environment()
