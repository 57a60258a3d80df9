"""Upload new entries at the checkpoints of a trainer, for machines that may be taken away."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from typing import Any, Literal, TypeAlias

from s3cache.cache import Cache, current_cache
from s3cache.errors import ConfigError
from s3cache.util.logs import logger_of

logger = logger_of("storage")

#: ``lightning`` is ``lightning.pytorch``, ``pytorch_lightning`` its older name.
Framework: TypeAlias = Literal["transformers", "lightning", "pytorch_lightning"]

# The class of callbacks in each framework, and its method that is called for a checkpoint.
_CALLBACKS = {
    "transformers": ("transformers", "TrainerCallback", "on_save"),
    "lightning": ("lightning.pytorch", "Callback", "on_save_checkpoint"),
    "pytorch_lightning": ("pytorch_lightning", "Callback", "on_save_checkpoint"),
}


def flush_at_checkpoint(
    framework: Framework | None = None, *, timeout_s: float = 30.0, cache: Cache | None = None
) -> Any:
    """Upload new entries at each checkpoint, waiting at most ``timeout_s``.

    In your own loop, use a context manager: ``with flush_at_checkpoint(): torch.save(...)`` flushes
    after the save. With ``framework`` it returns a callback for the trainer's ``callbacks``.
    transformers' ``Trainer`` calls it after a checkpoint is saved, Lightning right before. Each
    process of a job flushes its own entries. Uploads that are not done in time continue in the
    background, with a line at INFO.

    Args:
        framework: the framework to import; no other is imported.
        cache: the cache to flush; by default the one that was enabled last. Without a cache,
            nothing is done.

    Raises:
        ConfigError: the framework is not known, or not installed.
    """

    def flush(*_: object, **__: object) -> None:
        flushed = cache or current_cache()
        if flushed is not None and (remaining := flushed.flush(timeout_s).remaining):
            logger.info("%d uploads are unfinished at this checkpoint", remaining)

    if framework is None:
        block = contextlib.ExitStack()  # calls it at the end of the block, if that does not raise
        block.push(lambda error, *_: flush() if error is None else None)
        return block
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
        # Some launchers pickle callbacks for the processes that they start.
        "__reduce__": lambda _: (again, ()),
        "__module__": __name__,
    }
    return type("FlushAtCheckpoint", (base,), members)()
