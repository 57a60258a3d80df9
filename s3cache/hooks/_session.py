"""Turning the compile cache on for this process, and off again."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from s3cache import _autoload, metrics
from s3cache._importing import when_imported
from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.cache import Cache, Engine, announce, cache_over, latest
from s3cache.errors import S3CacheError
from s3cache.hooks._backward_modules import BackwardModules
from s3cache.hooks._backwards import Backwards
from s3cache.hooks._bundling import Bundling
from s3cache.hooks._bypasses import Bypasses
from s3cache.hooks._check import Report, checked
from s3cache.hooks._clearing import Clearing
from s3cache.hooks._events import Events
from s3cache.hooks._fx_graphs import FxGraphSeam
from s3cache.hooks._installation import remember_installation
from s3cache.hooks._kernels import Kernels
from s3cache.hooks._keys import CacheCalls, KeySeam, Registry
from s3cache.hooks._lookups import LookupSeam
from s3cache.hooks._patching import Patches
from s3cache.hooks._profiles import ProfileSeam
from s3cache.hooks._progress import Progress
from s3cache.hooks._records import Recording
from s3cache.hooks._registrations import watch_registrations
from s3cache.hooks._saves import SaveSeam
from s3cache.hooks._triton import TritonSeam
from s3cache.hooks._ways_around import WaysAround, without_caches
from s3cache.hooks._whole_guards import WholeGuards
from s3cache.settings import WATCHED, is_strict_by_environment
from s3cache.torch_api import bind_declarations, internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.settings import Options

__all__ = [
    "active",
    "check",
    "disable",
    "enable",
    "enable_by_environment",
    "enabled",
    "register_cacheable",
]

logger = logger_of()

_F = TypeVar("_F", bound=Function[object])
_P = ParamSpec("_P")


class Session:
    """One cache behind torch, from :func:`enable` to :func:`disable`.

    torch's compiler is not imported here: the seams go in when the program first needs it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cache = cache_over(engine)
        self.inquire = engine.inquire
        self._events = Events(engine.subscribe)
        self._patches = Patches()
        self._ways = Patches()  # apart, for they stay closed where no seam can be installed
        self._ways_around = WaysAround(engine.policy_digest) if engine.uses_trusted_only else None
        self._forget_kernels = watch_registrations()
        self._withdraw_ways = (
            when_imported(internals.CODE_CACHES, self._close_ways_around)
            if self._ways_around
            else None
        )
        self._withdraw = when_imported(internals.COMPILER, self._install)

    def _close_ways_around(self) -> None:
        assert self._ways_around is not None
        try:
            self._ways_around.install(self._ways)
        except Exception:
            self._ways.undo()
            _leave_torch_no_caches(self._engine, self._ways)
            if self._engine.settings.strict:
                raise
            logger_of("trust").warning(
                "cannot keep torch from what nobody has signed, so it has no caches",
                exc_info=True,
            )

    def _install(self) -> None:
        try:
            bind_declarations()
            remember_installation(self._engine.settings.local_dir)
            self._install_seams()
        except Exception:
            self._patches.undo()
            if self._ways_around is not None:
                _leave_torch_no_caches(self._engine, self._ways)
            if self._engine.settings.strict:
                raise
            logger.warning(
                "cannot get behind this torch; it compiles without a cache %s",
                pointer("UnsupportedTorchError"),
                exc_info=True,
            )

    def _install_seams(self) -> None:
        """In the order in which torch calls them."""
        calls, backwards = CacheCalls(), Backwards(registry.version_of)
        kernels = Kernels(share_sources=self._engine.settings.share_sources)
        bundling = Bundling(backwards)
        bypasses = Bypasses(self._engine)
        keys = KeySeam(registry, calls)
        recording = Recording(self._engine, keys, self._events)
        lookups = LookupSeam(
            self._engine, calls, keys, kernels, bundling, backwards, bypasses, recording
        )
        saves = SaveSeam(self._engine, calls, keys, kernels, bundling, bypasses, recording)
        halves = FxGraphSeam(self._engine, calls, keys, kernels, bundling, recording)
        keys.install_fx(self._patches)
        triton = TritonSeam(kernels.is_offered)
        Clearing(self._engine).install(self._patches)
        WholeGuards().install(self._patches)
        BackwardModules().install(self._patches)
        for seam in (backwards, keys, lookups, kernels, triton, bundling, halves, saves):
            seam.install(self._patches)
        if self._engine.settings.shape_profile:
            ProfileSeam(self._engine).install(self._patches)
        if os.environ.get(WATCHED):
            Progress(self._engine, recording).install(self._patches)

    def close(self) -> None:
        """Put torch back as it was, and finish the uploads."""
        self._withdraw()
        if self._withdraw_ways is not None:
            self._withdraw_ways()
        self._forget_kernels()
        self._patches.undo()
        self._ways.undo()
        self._engine.close()
        self._events.close()


class Abstention:
    """What is left of a session where this torch is not supported: no seam is tried.

    Where only what is signed may be used, torch has no caches of its own either.

    Args:
        engine: one that looks nothing up.
    """

    def __init__(self, engine: Engine) -> None:
        self.cache = cache_over(engine)
        self._engine = engine
        self._ways = Patches()
        self._withdraw = (
            when_imported(internals.CODE_CACHES, self._close_ways_around)
            if engine.uses_trusted_only
            else None
        )

    def _close_ways_around(self) -> None:
        _leave_torch_no_caches(self._engine, self._ways)

    def close(self) -> None:
        """Put torch back as it was."""
        if self._withdraw is not None:
            self._withdraw()
        self._ways.undo()
        self._engine.close()


def _leave_torch_no_caches(engine: Engine, ways: Patches) -> None:
    """Where only what is signed may be used, and we do not get behind torch's caches."""
    try:
        without_caches(ways)
    except Exception:
        if engine.settings.strict:
            raise
        logger_of("trust").warning("torch may use what nobody has signed", exc_info=True)


_mutex = threading.Lock()
_environment_mutex = threading.Lock()  # taken before the other one
_session: Session | None = None
_abstention: Abstention | None = None  # instead
_tried_environment = False
registry = Registry()


def active() -> Cache | None:
    """The cache that torch.compile uses now, if any.

    One that the environment asks for, and that waits for the first compile, is enabled by this.
    """
    _autoload.go_ahead()
    return None if _session is None else _session.cache


def enable(url: str | None = None, **options: Unpack[Options]) -> Cache:
    """Have every ``torch.compile`` of this process look up, and share, what it compiles.

    Replaces what an earlier call has enabled. Settings and store options may also come from the
    environment; see :meth:`s3cache.Cache.open`.

    Returns:
        The cache. Where this torch is not supported, one that does nothing (``mode="off"``); one
        warning says so, and :func:`active` has none. With ``trust="require"`` torch's own caches
        are off then too, as nobody signs what is in them.

    Raises:
        ConfigError: the URL or a setting cannot be used.
    """
    global _session, _abstention
    _autoload.cancel()
    with _mutex:
        _close()
        if not internals.is_supported():
            inert: Options = {**options, "mode": "off"}
            _abstention = Abstention(Engine.open(url, **inert))
            return _abstention.cache
        engine = Engine.open(url, **options)
        try:
            _session = Session(engine)
        except Exception:  # strict
            engine.close()
            raise
        cache = _session.cache
        announce(cache)
        if engine.settings.summary or engine.settings.metrics_file:
            atexit.unregister(_sum_up)  # once, however often this is called
            atexit.register(_sum_up)
        return cache


def enable_by_environment() -> None:
    """:func:`enable` as the environment has it, if nobody has done so; tried once.

    For those who cannot catch what it raises: one warning, and no cache.

    Raises:
        S3CacheError: what keeps it from that, where the environment says strict.
    """
    global _tried_environment
    with _environment_mutex:
        if _tried_environment or _session is not None:
            return
        _tried_environment = True
        try:
            enable()
        except Exception as exc:
            if is_strict_by_environment():
                raise
            logger.warning(
                "not enabled, so this compiles without a cache: %s %s",
                exc,
                pointer(code_of(exc)),
                exc_info=None if isinstance(exc, S3CacheError) else exc,
            )


def disable() -> None:
    """Put torch back exactly as it was; waits for uploads, ``exit_timeout_s`` at most."""
    _autoload.cancel()
    with _mutex:
        _close()


@contextlib.contextmanager
def enabled(url: str | None = None, **options: Unpack[Options]) -> Iterator[Cache]:
    """:func:`enable` for the block, then :func:`disable`."""
    try:
        yield enable(url, **options)
    finally:
        disable()


def register_cacheable(function: _F, *, version: str) -> _F:
    """Vouch that what ``function`` returns depends on its arguments and ``version`` alone.

    Graphs that call it can then be cached; the version is part of their key.

    Raises:
        ConfigError: ``function`` has no importable name, or ``version`` is empty.
    """
    registry.add(function, version)
    return function


def check(function: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> Report:
    """Find out what of ``function(*args, **kwargs)`` can be cached, and what cannot and why.

    It is called once, traced as ``torch.compile`` would and run without being compiled; what it
    does to its arguments happens. ``function`` may be a module, and may be compiled already: then
    with its own options. Compiled code of this process is dropped, so do this before training.
    Where a cache is enabled it is asked what it has of each graph.

    Raises:
        Exception: what ``function`` raises.
    """
    inquire = None if _session is None else _session.inquire
    return checked(function, registry, args, kwargs, inquire)


def _close() -> None:
    global _session, _abstention
    session, _session = _session, None
    if session is not None:
        session.close()
    abstention, _abstention = _abstention, None
    if abstention is not None:
        abstention.close()


def _sum_up() -> None:
    """Say what the cache that was enabled last came to. At exit: the uploads are over."""
    cache = latest()
    if cache is None:
        return
    settings = cache.settings
    if settings.summary:
        rank, stats = os.environ.get("RANK"), cache.stats()
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr
            if settings.summary == "json":
                said = {"rank": rank, "pid": os.getpid(), **stats.in_numbers()}
                sys.stderr.write(f"{json.dumps(said)}\n")
            else:
                whose = "" if rank is None else f"rank {rank}: "
                sys.stderr.write(f"s3cache: {whose}{stats.in_words()}\n")
    if settings.metrics_file:
        metrics.leave_textfile(settings.metrics_file, cache.stats)


def _after_fork_in_child() -> None:
    global _mutex, _environment_mutex
    # Whoever held them is not in the child.
    _mutex, _environment_mutex = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
