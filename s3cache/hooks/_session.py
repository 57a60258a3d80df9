"""Turning the compile cache on for this process, and off again."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from _s3cache_process import is_asked
from s3cache import metrics
from s3cache.cache import Cache, current_cache, open_for_torch, set_current
from s3cache.errors import S3CacheError, UnsupportedTorchError, code_of
from s3cache.graph import BypassReason, Graph, GraphBreak, Report, take_baseline
from s3cache.hooks._again import deserialize_backward
from s3cache.hooks._bypasses import Bypasses, Progress
from s3cache.hooks._compiles import Compiles
from s3cache.hooks._directories import lock_down, lock_down_triton, remember_installation
from s3cache.hooks._lookups import Lookups
from s3cache.hooks._rebuild import Kernels
from s3cache.hooks._state import (
    CacheCall,
    CompileEvents,
    CompileState,
    KeyHook,
    Patches,
    Registry,
    watch_registrations,
)
from s3cache.seam import features, launch
from s3cache.settings import WATCHED, is_strict_by_environment
from s3cache.torch_api import check_names, internals, require
from s3cache.torch_api.protocols import Function
from s3cache.util.importing import first_compile, when_imported
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module
    from typing_extensions import Unpack

    from s3cache.options import Options
    from s3cache.torch_api.protocols import AOTConfig

logger = logger_of()

_F = TypeVar("_F", bound=Function[object])
_P = ParamSpec("_P")


class Session:
    """One cache behind torch, from :func:`enable` to :func:`disable`.

    Hooks are installed when the program first imports torch's compiler: those that the cache
    requires together, or not at all. Any other hook can fail alone: a warning names the feature.
    If torch is not supported, no hook is installed, and torch's own caches are off if only
    signed entries may be used.
    """

    def __init__(self, cache: Cache, *, supported: bool = True) -> None:
        self.cache = cache if supported else None  # that torch.compile uses
        self.engine = engine = cache.engine
        settings = engine.settings
        self.events = events = CompileEvents(strict=settings.strict)
        self.state, self.bypasses = state, bypasses = CompileState(), Bypasses(engine)
        self.keys = keys = KeyHook(process.registry, state)
        self.kernels = kernels = Kernels(
            state, share_sources=settings.share_sources, on_triton=events.rebuilding.tell
        )
        self.compiles = Compiles(engine, state, keys, kernels, bypasses, events)
        self.lookups = Lookups(engine, state, keys, bypasses, events, self.compiles)
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
            of_policy = engine.policy.digest, self._locked
            lock = partial(lock_down, *of_policy, supported=supported)
            undo.callback(when_imported(internals.CODE_CACHES, lock))
            undo.callback(when_imported(internals.TRITON, partial(lock_down_triton, *of_policy)))
        if supported:
            for feature in features():
                if feature.is_used(settings):
                    feature.call(feature.installs, self, strict=settings.strict)
            # The hook around Dynamo's compiles is installed before the first of them begins.
            hold = partial(self.install_part, internals.HOLDING, self._hold, bind=False)
            undo.callback(when_imported(internals.DYNAMO, hold))
            undo.callback(when_imported(internals.COMPILER, self._install))

    def _hold(self, patches: Patches) -> None:
        patches.wrap(internals.compile_frame, self.state.compile_frame)

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
        patches.install(self.state)
        keys.install(patches)
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


class Process:
    """The session of this process, and what outlives it."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.session: Session | None = None
        self.tried_environment = False
        self.registry = Registry()

    @property
    def cache(self) -> Cache | None:
        """The cache that torch.compile uses now, if any."""
        return None if self.session is None else self.session.cache

    def close(self) -> None:
        """End the session, if there is one."""
        session, self.session = self.session, None
        if session is not None:
            session.undo.close()


process = Process()


def active() -> Cache | None:
    """Return the cache that torch.compile uses now; enable it if the environment configures it."""
    by_torch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if by_torch and "torch" not in sys.modules and is_asked():
        first_compile.wait(enable_by_environment)
    first_compile.end()
    return process.cache


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
    first_compile.cancel()
    with process.mutex:
        process.close()
        if not internals.is_supported():
            inert: Options = {**options, "mode": "off"}
            cache = open_for_torch(url, inert)
            process.session = Session(cache, supported=False)
            return cache
        cache = open_for_torch(url, options)
        try:
            process.session = Session(cache)
        except Exception:  # strict
            cache.close()
            raise
        set_current(cache)
        if cache.settings.summary or cache.settings.metrics_file:
            atexit.unregister(_print_summary)  # so that it is registered once
            atexit.register(_print_summary)
        return cache


def enable_by_environment() -> None:
    """Call :func:`enable` once, if the environment configures a cache.

    If it fails, warn, or raise the error if the environment sets strict mode.
    """
    with process.mutex:
        if process.tried_environment or process.session is not None:
            return
        process.tried_environment = True
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
    with process.mutex:
        process.close()


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
    process.registry.add(function, version)
    return function


# -- check
#
# Only the hook for keys is installed. torch traces the function as usual; instead of a lookup,
# the key of the graph is computed and the graph runs uncompiled.


def check(function: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> Report:
    """Report which graphs of ``function(*args, **kwargs)`` can be cached, and why others cannot.

    ``function`` is called once: traced like ``torch.compile`` traces it, and run uncompiled. Side
    effects on its arguments happen. It may be a module, and may be compiled already: then its own
    options apply. Compiled code of this process is dropped, so call this before training. If a
    cache is enabled, the report says which graphs it has.

    Raises:
        Exception: what ``function`` raises.
    """
    report, cache = _traced(function, args, kwargs), process.cache
    if cache is None:
        return report
    probe = cache.engine.probe
    graphs = (replace(g, entry=probe(g.key)) if g.key is not None else g for g in report.graphs)
    return replace(report, graphs=tuple(graphs))


def _traced(
    function: Function[object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Report:
    import torch

    # Nothing is compiled, so that replaced functions of torch might still run in a compile.
    state, graphs = CompileState(observed=contextlib.nullcontext), list[Graph]()
    keys = KeyHook(process.registry, state)

    def load(
        _: object,
        mod: Module,
        inputs: Sequence[object],
        config: AOTConfig,
        *others: object,
        **__: object,
    ) -> object:
        """Replace AOTAutograd's cache: every lookup returns the graph itself."""
        nodes = len(internals.graph_module_of(mod).graph.nodes)
        context = internals.context_of_fake_call()
        if context is not None and context.fw_metadata is None:
            context.fw_metadata = object()  # DDPOptimizer requires some
        with state.entered(CacheCall()) as call:
            try:
                key = internals.name_of_key(mod, inputs, config, others)
                components = dict(keys.known(key).components)
                if not components:
                    raise KeyError(key)  # a key that torch made up
                graphs.append(Graph(nodes, key, components, ()))
            except Exception as exc:  # noqa: BLE001 - the report says it
                reasons = call.reasons or (BypassReason("error", repr(exc)),)
                graphs.append(Graph(nodes, None, {}, reasons))
        return internals.as_load_result(_eagerly(mod), config)

    take_baseline(early=False)
    # A compiled function keeps its own options.
    is_compiled = isinstance(function, internals.optimized_module.get()) or hasattr(
        function, internals.ORIGINAL_CALLABLE
    )
    compiled = function if is_compiled else torch.compile(function)
    torch.compiler.reset()
    grad, patches = torch.is_grad_enabled(), Patches()
    try:
        patches.install(state)
        keys.install(patches)
        # Also if torch's caches are off: the report names that as a reason.
        patches.wrap(internals.should_use_local_cache, lambda _: True)
        patches.wrap(internals.try_load, load)
        compiled(*args, **kwargs)
        breaks = map(internals.describe_break, internals.graph_break_reasons.get())
        return Report(tuple(graphs), tuple(GraphBreak(**reason) for reason in breaks))
    except BaseException:
        torch.set_grad_enabled(grad)  # a graph that raises may leave it changed
        raise
    finally:
        patches.close()
        torch.compiler.reset()  # the callables made here must not run again


def _eagerly(mod: Module) -> Callable[[Sequence[object]], object]:
    graph = getattr(mod, "graph", None)
    if graph is None:
        return lambda inputs: mod(*inputs)
    # A graph module with its own parameters does not take them from the list.
    count = len(graph.find_nodes(op="placeholder"))
    return lambda inputs: mod(*inputs[len(inputs) - count :])


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
    compiler: Function[Function[object]] = internals.inductor_backend.get()(mode, options, None)
    return compiler(gm, example_inputs)


def _print_summary() -> None:
    """Print the counts of the last enabled cache, after its uploads have ended."""
    cache = current_cache()
    if cache is None:
        return
    if cache.settings.summary:
        here, stats = launch(), cache.stats()
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be missing
            if cache.settings.summary == "json":
                job = {here.word: here.number or None} if here.word else {}
                counts = {**job, "pid": os.getpid(), **stats.in_numbers()}
                sys.stderr.write(f"{json.dumps(counts)}\n")
            else:
                prefix = f"{here.name}: " if here.name else ""
                sys.stderr.write(f"s3cache: {prefix}{stats.in_words()}\n")
    if cache.settings.metrics_file:
        metrics.leave_textfile(cache.settings.metrics_file, cache.stats)


def _after_fork_in_child() -> None:
    process.mutex = threading.RLock()  # the thread that held it does not exist in the child
    if process.cache is not None and internals.ASYNC_COMPILE in sys.modules:
        with contextlib.suppress(Exception):  # a fork of a program must not fail
            internals.compile_pool.get().cache_clear()  # its threads do not exist in the child


os.register_at_fork(after_in_child=_after_fork_in_child)
