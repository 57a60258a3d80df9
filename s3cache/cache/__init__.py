"""The cache: the disk tier before the remote one, and the only place that swallows errors.

Below this package what a caller waits for raises; here an error becomes a :class:`Miss` with its
reason, a count and one warning, or, with ``strict``, is raised after all.

:class:`Cache` is for everybody. :class:`Engine` is a cache with what torch's hooks need beside,
and :func:`current_cache` the one that torch.compile was given last.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeAlias, overload

from s3cache import entries
from s3cache.cache._cache import Cache
from s3cache.cache._lookup import CandidateLookup, Hit, Miss, NotSaved, Saved
from s3cache.errors import ConfigError
from s3cache.records import Event, Record, Run
from s3cache.stats import Counters, Level
from s3cache.util.logs import logger_of

__all__ = [
    "Cache",
    "CandidateLookup",
    "Engine",
    "Framework",
    "Hit",
    "Miss",
    "NotSaved",
    "Saved",
    "current_cache",
    "flush_at_checkpoint",
    "recorded",
    "set_current",
]

logger = logger_of("storage")


class Engine(Cache):
    """A :class:`Cache` with what torch's hooks need: levels, candidates, records."""

    candidates = Cache._candidates
    save = Cache._save

    @property
    def uses_trusted_only(self) -> bool:
        """Whether only entries that a trusted key has signed are used."""
        return self._policy.level == "require"

    @property
    def policy_digest(self) -> str:
        """A digest of the list of trusted keys."""
        return self._policy.digest

    @property
    def has_remote(self) -> bool:
        """Whether there is a remote at all; it may not answer."""
        return self._open_remote is not None

    def probe(self, key: str) -> str:
        """Say where an entry under ``key`` is, or why none is used, without counting that."""
        counters = Counters()
        with self.candidates(key, counters=counters) as lookup:
            for hit in lookup:
                return hit.tier
        causes = ", ".join(f"{count} {cause}" for cause, count in counters.level().refused.items())
        (reason,) = counters.level().misses
        return f"{reason} ({causes})" if causes else str(reason)

    def supersede(self, key: str, variant: str) -> None:
        """Remove what was saved provisionally, unless its upload is under way."""
        name = entries.variant_name(key, variant)
        if name not in self._provisional:
            return
        self._provisional.discard(name)
        try:
            if self._remote is not None:
                is_removed = self._remote.uploads.cancel_delayed(name)
            else:
                is_removed = self._local.holds(name)
                is_removed &= self._local.write(lambda disk: disk.delete(name))
        except Exception as exc:  # noqa: BLE001 - then it is uploaded, which does no harm
            self._problems.met("local", "an entry that is not needed cannot be removed", exc)
        else:
            if is_removed:
                self._counters_of["fx"].superseded()

    def count_bypass(self, reasons: Iterable[str], level: Level = "aot") -> None:
        """Count something that cannot be cached, and why, by short names of the reasons."""
        self._counters_of[level].bypassed(reasons)

    def count_time_saved(self, seconds: float) -> None:
        """Count what making a hit took where it was made."""
        self._counters.time_saved(seconds)

    def record(self, what: Record | Event) -> None:
        """Record the outcome of a lookup, in the background."""
        if self.settings.record:
            self._records.add(what)

    def note(self, **values: object) -> None:
        """Record how far the program is, for a process that watches it."""
        if self.settings.record:
            self._records.add(values)

    def recorded(self) -> Run:
        """Return the last few hundred lookups of this process, the oldest first; any thread."""
        return Run(self._records.run, self._records.held())


# -- the current one

_current: Cache | None = None


def set_current(cache: Cache) -> None:
    """Make ``cache`` the current one."""
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
