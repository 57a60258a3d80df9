"""Upload what was compiled whenever a checkpoint is saved: for machines that may go away.

Uploads go on in the background, and what a machine did not get to is uploaded by the next process
there. A spot machine has no next process; when its program saves a checkpoint it is about to lose
nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from s3cache.cache._latest import latest
from s3cache.errors import ConfigError
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.cache._cache import Cache

__all__ = ["Framework", "flush_at_checkpoint"]

logger = logger_of("storage")

#: ``lightning`` is ``lightning.pytorch``, ``pytorch_lightning`` its older name.
Framework: TypeAlias = Literal["transformers", "lightning", "pytorch_lightning"]

# Where the class of callbacks is, and which of its methods is called where a checkpoint is saved.
_CALLBACKS = {
    "transformers": ("transformers", "TrainerCallback", "on_save"),
    "lightning": ("lightning.pytorch", "Callback", "on_save_checkpoint"),
    "pytorch_lightning": ("pytorch_lightning", "Callback", "on_save_checkpoint"),
}


@overload
def flush_at_checkpoint(
    framework: None = None, *, timeout_s: float = 30.0, cache: Cache | None = None
) -> AbstractContextManager[None]: ...
@overload
def flush_at_checkpoint(
    framework: Framework, *, timeout_s: float = 30.0, cache: Cache | None = None
) -> Any: ...
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
    flush = partial(_flush, timeout_s, cache)
    if framework is None:
        return _flush_after(flush)
    if framework not in _CALLBACKS:
        fix = f"give one of {', '.join(_CALLBACKS)}"
        raise ConfigError(f"framework {framework!r}", "is not known", fix)
    again = partial(flush_at_checkpoint, framework, timeout_s=timeout_s)
    return _callback(framework, flush, again)


@contextlib.contextmanager
def _flush_after(flush: Callable[[], None]) -> Iterator[None]:
    yield
    flush()


def _flush(timeout_s: float, cache: Cache | None) -> None:
    if cache is None:
        cache = latest()
    if cache is None:
        return
    report = cache.flush(timeout_s)
    if report.remaining:
        logger.info("%d are not uploaded at this checkpoint", report.remaining)


def _callback(framework: str, flush: Callable[[], None], again: Callable[[], Any]) -> Any:
    package, name, event = _CALLBACKS[framework]
    try:
        base = getattr(importlib.import_module(package), name)
    except ImportError as exc:
        cause, fix = f"cannot be imported ({exc})", f"pip install {framework}"
        raise ConfigError(f"framework {framework}", cause, fix) from exc

    def saved(_: object, *args: object, **kwargs: object) -> None:
        flush()

    def reduce(_: object) -> tuple[Callable[[], Any], tuple[()]]:
        return again, ()  # as some launchers pickle callbacks, for processes that they start

    members = {event: saved, "__reduce__": reduce, "__module__": __name__}
    return type("FlushAtCheckpoint", (base,), members)()
