"""The cache: the disk tier before the remote one, and the only place that swallows errors.

Below this package what a caller waits for raises; here an error becomes a :class:`Miss` with its
reason, a count and one warning, or, with ``strict``, is raised after all.

:class:`Cache` is for everybody. :class:`Engine` is a cache with what torch's hooks need beside,
and :func:`current_cache` the one that torch.compile was given last.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

from s3cache.cache._cache import Cache as Cache
from s3cache.cache._cache import Engine as Engine
from s3cache.cache._lookup import CandidateLookup as CandidateLookup
from s3cache.cache._lookup import Hit as Hit
from s3cache.cache._lookup import LocalTier as LocalTier
from s3cache.cache._lookup import Miss as Miss
from s3cache.cache._lookup import NotSaved as NotSaved
from s3cache.cache._lookup import Saved as Saved
from s3cache.errors import ConfigError
from s3cache.records import Run
from s3cache.util.logs import logger_of

logger = logger_of("storage")


# -- the current one

_current: Cache | None = None


def set_current(cache: Cache) -> None:
    global _current
    _current = cache


def current_cache() -> Cache | None:
    """Return the cache that was enabled last, even if it is off again: its counts stay."""
    return _current


def recorded() -> Run | None:
    """Return the last lookups of the cache that was enabled last."""
    return _current.recorded() if isinstance(_current, Engine) else None


# -- for machines that may go away

#: ``lightning`` is ``lightning.pytorch``, ``pytorch_lightning`` its older name.
Framework: TypeAlias = Literal["transformers", "lightning", "pytorch_lightning"]

# Where the class of callbacks is, and which of its methods is called where a checkpoint is saved.
_CALLBACKS = {
    "transformers": ("transformers", "TrainerCallback", "on_save"),
    "lightning": ("lightning.pytorch", "Callback", "on_save_checkpoint"),
    "pytorch_lightning": ("pytorch_lightning", "Callback", "on_save_checkpoint"),
}


def flush_at_checkpoint(
    framework: Framework | None = None, *, timeout_s: float = 30.0, cache: Cache | None = None
) -> Any:
    """Have what was compiled uploaded where a checkpoint is saved, at most ``timeout_s`` long.

    In a loop of one's own, around what saves it: ``with flush_at_checkpoint(): torch.save(...)``
    flushes when that has been saved. With ``framework`` it is a callback for the trainer's
    ``callbacks``: of transformers' ``Trainer``, when a checkpoint has been saved; of Lightning's,
    right before one is written. Each process of a job flushes what it has compiled itself. What is
    not uploaded by then goes on in the background, with a line at INFO.

    Args:
        framework: the only one that is imported.
        cache: instead of the one that was enabled last; where there is none nothing is done.

    Raises:
        ConfigError: the framework is not known, or not installed.
    """

    def flush(*_: object, **__: object) -> None:
        flushed = cache or _current
        if flushed is not None and (remaining := flushed.flush(timeout_s).remaining):
            logger.info("%d are not uploaded at this checkpoint", remaining)

    if framework is None:
        return _flush_after(flush)
    if framework not in _CALLBACKS:
        fix = f"give one of {', '.join(_CALLBACKS)}"
        raise ConfigError(f"framework {framework!r}", "is not known", fix)
    package, name, event = _CALLBACKS[framework]
    try:
        base = getattr(importlib.import_module(package), name)
    except ImportError as exc:
        cause, fix = f"cannot be imported ({exc})", f"pip install {framework}"
        raise ConfigError(f"framework {framework}", cause, fix) from exc
    again = partial(flush_at_checkpoint, framework, timeout_s=timeout_s)
    members = {
        event: flush,
        # As some launchers pickle callbacks, for processes that they start.
        "__reduce__": lambda _: (again, ()),
        "__module__": __name__,
    }
    return type("FlushAtCheckpoint", (base,), members)()


@contextlib.contextmanager
def _flush_after(flush: Callable[[], None]) -> Iterator[None]:
    yield
    flush()
