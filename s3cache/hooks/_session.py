"""Turning the compile cache on for this process, and off again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from _s3cache_process import is_asked
from s3cache import metrics
from s3cache.cache import Cache, Engine, active_cache, current_cache, open_for_torch, set_active
from s3cache.errors import S3CacheError, UnsupportedTorchError, code_of
from s3cache.graph import Report
from s3cache.hooks._again import deserialize_backward
from s3cache.hooks._bypasses import Bypasses, Progress
from s3cache.hooks._check import checked
from s3cache.hooks._compiles import Compiles
from s3cache.hooks._directories import lock_down, lock_down_triton, remember_installation
from s3cache.hooks._keys import KeyHook, Registry, watch_registrations
from s3cache.hooks._lookups import Lookups
from s3cache.hooks._rebuild import Kernels
from s3cache.hooks._state import CompileEvents, CompileState, Patches
from s3cache.seam import features
from s3cache.settings import WATCHED, is_strict_by_environment
from s3cache.torch_api import check_names, internals, require
from s3cache.torch_api.protocols import Function
from s3cache.util.importing import first_compile, when_imported
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from typing_extensions import Unpack

    from s3cache.options import Options

logger = logger_of()

_F = TypeVar("_F", bound=Function[object])
_P = ParamSpec("_P")


class Session:
    """One cache behind torch, from :func:`enable` to :func:`disable`.

    torch's compiler is not imported here: hooks are installed when the program first imports it.
    The hooks that the cache requires are installed together, or not at all. Any other hook can fail
    alone: a warning names the feature that is off. If torch is not supported, no hook is installed,
    and torch's own caches are off if only signed entries may be used.
    """

    def __init__(self, engine: Engine, *, supported: bool = True) -> None:
        self.engine, settings = engine, engine.settings
        self.events = CompileEvents(strict=settings.strict)
        self.state, self.bypasses = CompileState(), Bypasses(engine)
        self.kernels = Kernels(
            self.state, share_sources=settings.share_sources, on_triton=self.events.rebuilding.tell
        )
        self._patches = Patches()
        self._locked = Patches()  # separate: they stay even if no hook can be installed
        self._early_failures: list[Exception] = []
        self._loads = False
        #: Functions of features that install hooks; if one fails, so does the cache.
        self.required: list[Callable[[Patches], object]] = []
        self.undo = undo = contextlib.ExitStack()
        undo.callback(engine.close)
        undo.callback(self._locked.close)
        if supported:
            undo.callback(self._patches.close)
            undo.callback(watch_registrations(self._early_failures.append))
        if engine.policy.level == "require":
            policy, locked = engine.policy.digest, self._locked
            lock = functools.partial(lock_down, policy, locked, supported=supported)
            undo.callback(when_imported(internals.CODE_CACHES, lock))
            lock_triton = functools.partial(lock_down_triton, policy, locked)
            undo.callback(when_imported(internals.TRITON, lock_triton))
        if supported:
            for feature in features():
                if feature.is_used(settings):
                    feature.call(feature.installs, self, strict=settings.strict)
            undo.callback(when_imported(internals.DYNAMO, self._install_holding))
            undo.callback(when_imported(internals.COMPILER, self._install))

    @functools.cached_property
    def keys(self) -> KeyHook:
        return KeyHook(registry, self.state)

    @functools.cached_property
    def compiles(self) -> Compiles:
        parts = self.engine, self.state, self.keys, self.kernels, self.bypasses, self.events
        return Compiles(*parts)

    @functools.cached_property
    def lookups(self) -> Lookups:
        parts = self.engine, self.state, self.keys, self.bypasses, self.events, self.compiles
        return Lookups(*parts)

    def _install(self) -> None:
        try:
            for error in self._early_failures:
                raise error
            require()
            if internals.is_untested():
                check_names()
                internals.warn_of_release(
                    "is newer than any release that was tested",
                    "it has every name that the cache needs, so the cache is on",
                )
            self._install_hooks()
        except Exception as exc:
            self._patches.close()
            if self.engine.policy.level == "require":
                lock_down(self.engine.policy.digest, self._locked, supported=False)
            if self.engine.settings.strict:
                raise
            logger.warning(
                "this torch has other internals than expected; it compiles without a cache: %s %s",
                exc,
                pointer("UnsupportedTorchError"),
                exc_info=not isinstance(exc, UnsupportedTorchError),
            )

    def _install_hooks(self) -> None:
        patches, keys, directory = self._patches, self.keys, self.engine.settings.local_dir
        # The hooks that the cache requires: all of them, or none.
        for hooks in (self.state, keys):
            patches.install(hooks)
        self.install_loading()
        self.compiles.install(patches)
        self.lookups.install(patches)
        patches.callback(internals.skip_package("s3cache"))
        for install in self.required:
            install(patches)
        # Features that can fail alone.
        part = self.install_part
        part(internals.TORCH_KEY, lambda _: remember_installation(directory))
        part(internals.KEY_LOGS, lambda p: p.wrap(internals.fx_debug_lines, keys.debug_lines))
        part(internals.TRACES, lambda _: None)  # warns only: traces check for the names themselves
        if os.environ.get(WATCHED):
            part(internals.WATCHING, Progress(self.engine).install)

    def install_loading(self) -> None:
        """Install the hooks that make a callable of an entry, once."""
        if self._loads:
            return
        self._patches.install(self.kernels)
        self._patches.wrap(internals.deserialize_backward, deserialize_backward)
        functions, more = internals.guard_functions.get(), internals.branch_free()
        functions.update(more)
        self._patches.callback(lambda: [functions.pop(name, None) for name in more])
        self._loads = True

    def _install_holding(self) -> None:
        """Install the hook around Dynamo's compiles, before the first of them begins."""

        def install(patches: Patches) -> None:
            patches.wrap(internals.compile_frame, self.state.compile_frame)

        self.install_part(internals.HOLDING, install, bind=False)

    def install_part(
        self, feature: str, install: Callable[[Patches], object], *, bind: bool = True
    ) -> None:
        """Install hooks that can fail alone; a warning then names what is off."""
        patches = Patches()
        try:
            if bind:
                require(feature)
            install(patches)
        except Exception as exc:
            patches.close()
            if self.engine.settings.strict:
                raise
            logger.warning("%s is off: %s", feature, exc)
        else:
            self._patches.callback(patches.close)


_mutex = threading.RLock()
_session: Session | None = None
_tried_environment = False
registry = Registry()


def active() -> Cache | None:
    """Return the cache that torch.compile uses now, if any.

    If the environment configures a cache, enable it now and not at the first compile.
    """
    by_torch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if by_torch and "torch" not in sys.modules and is_asked():
        first_compile.wait(enable_by_environment)
    first_compile.end()
    return active_cache()


def enable(url: str | None = None, **options: Unpack[Options]) -> Cache:
    """Enable the cache for every ``torch.compile`` of this process.

    Replaces the cache of an earlier call. Settings and store options may also come from the
    environment; see :meth:`s3cache.Cache.open`.

    Returns:
        The cache. If this torch is not supported, a warning says so, the returned cache does
        nothing (``mode="off"``), and :func:`active` returns None. With ``trust="require"`` torch's
        own caches are then off too, because their content is not signed.

    Raises:
        ConfigError: the URL or a setting cannot be used.
    """
    global _session
    first_compile.cancel()
    with _mutex:
        _close()
        if not internals.is_supported():
            inert: Options = {**options, "mode": "off"}
            cache = open_for_torch(url, inert)
            _session = Session(cache.engine, supported=False)
            return cache
        cache = open_for_torch(url, options)
        try:
            _session = Session(cache.engine)
        except Exception:  # strict
            cache.close()
            raise
        set_active(cache)
        if cache.settings.summary or cache.settings.metrics_file:
            atexit.unregister(_print_summary)  # so that it is registered once
            atexit.register(_print_summary)
        return cache


def enable_by_environment() -> None:
    """Call :func:`enable` once, if the environment configures a cache; warn if it fails.

    Raises:
        S3CacheError: enabling failed, and the environment sets strict mode.
    """
    global _tried_environment
    with _mutex:
        if _tried_environment or _session is not None:
            return
        _tried_environment = True
        try:
            enable()
        except Exception as exc:
            if is_strict_by_environment():
                raise
            logger.warning(
                "not enabled; this process compiles without a cache: %s %s",
                exc,
                pointer(code_of(exc)),
                exc_info=None if isinstance(exc, S3CacheError) else exc,
            )


def disable() -> None:
    """Restore torch exactly; wait for uploads, at most ``exit_timeout_s``."""
    first_compile.cancel()
    with _mutex:
        _close()


@contextlib.contextmanager
def enabled(url: str | None = None, **options: Unpack[Options]) -> Iterator[Cache]:
    """Call :func:`enable` for the block, then :func:`disable`."""
    try:
        yield enable(url, **options)
    finally:
        disable()


def register_cacheable(function: _F, *, version: str) -> _F:
    """Declare that the result of ``function`` depends only on its arguments and ``version``.

    Graphs that call it can then be cached; the version is part of their key.

    Raises:
        ConfigError: ``function`` has no importable name, or ``version`` is empty.
    """
    registry.add(function, version)
    return function


def check(function: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> Report:
    """Report which graphs of ``function(*args, **kwargs)`` can be cached, and why others cannot.

    ``function`` is called once: traced like ``torch.compile`` traces it, and run uncompiled. Side
    effects on its arguments happen. It may be a module, and may be compiled already: then its own
    options apply. Compiled code of this process is dropped, so call this before training. If a
    cache is enabled, the report says which graphs it has.

    Raises:
        Exception: what ``function`` raises.
    """
    cache = active_cache()
    probe = None if cache is None else cache.engine.probe
    return checked(function, registry, args, kwargs, probe)


def backend(
    gm: GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Function[object]:
    """Compile with Inductor and the cache: ``torch.compile(backend="s3cache")``.

    The environment configures the cache, unless it is already enabled. ``mode`` and ``options`` are
    those of ``torch.compile``. torch finds this function through the entry point group
    ``torch_dynamo_backends``.
    """
    if active() is None:
        enable_by_environment()
    # The same as ``backend="inductor"``, which checks mode and options.
    compiled: Function[object] = internals.inductor_backend.get()(mode, options, None)(
        gm, example_inputs
    )
    return compiled


def _close() -> None:
    global _session
    session, _session = _session, None
    set_active(None)
    if session is not None:
        session.undo.close()


def _print_summary() -> None:
    """Print the counts of the last enabled cache, after its uploads have ended."""
    cache = current_cache()
    if cache is None:
        return
    settings = cache.settings
    if settings.summary:
        rank, stats = os.environ.get("RANK"), cache.stats()
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be missing
            if settings.summary == "json":
                counts = {"rank": rank, "pid": os.getpid(), **stats.in_numbers()}
                sys.stderr.write(f"{json.dumps(counts)}\n")
            else:
                prefix = "" if rank is None else f"rank {rank}: "
                sys.stderr.write(f"s3cache: {prefix}{stats.in_words()}\n")
    if settings.metrics_file:
        metrics.leave_textfile(settings.metrics_file, cache.stats)


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.RLock()  # the thread that held it does not exist in the child
    if active_cache() is not None and internals.ASYNC_COMPILE in sys.modules:
        with contextlib.suppress(Exception):  # a fork of a program must not fail
            internals.compile_pool.get().cache_clear()  # its threads do not exist in the child


os.register_at_fork(after_in_child=_after_fork_in_child)
