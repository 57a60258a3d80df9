"""The compile that is under way on a thread, and which compiles end in an entry.

Between a lookup that misses and the save, torch compiles the graph's forward and backward. With
``bundled_autograd_cache`` one entry holds a whole graph. That must hold for the graphs that s3cache
saves and for nothing else. The option cannot simply be set: it would be part of torch's key,
options are set for one thread only, and Inductor would leave its cache of FX graphs alone, which
is the second level here (``_fx_graphs``). Only where Inductor does not cache an FX graph by itself
is it set for that graph: the entry then gets what the second level would have collected.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.graph import BypassReason, reads_storage_offsets, settings_digest
from s3cache.hooks._conditions import Compile, FxInfo, attach_fx_info
from s3cache.hooks._first_calls import Described, UndescribedError, described_outputs
from s3cache.hooks._patching import Patches
from s3cache.store import Buffer
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import (
        AOTConfig,
        CompiledGraph,
        FirstCallWrapper,
        Function,
        RuntimeMetadata,
        TracingContext,
    )

__all__ = ["CacheCall", "CompileState", "PendingCompiles"]

logger = logger_of("saves")

# As many keys as there may be between a lookup that misses and the save.
_REMEMBERED = 1024
# What AOTAutograd is given to compile a graph by, if not by Inductor.
_COMPILERS = ("bw_compiler", "decompositions", "fw_compiler", "inference_compiler", "partition_fn")


class CacheCall:
    """One call of torch into its cache, from its start to its end: what the hooks have met in it.

    torch swallows what its cache raises. The first error is kept here too, so that strict mode can
    raise it where torch does not swallow any more.

    Attributes:
        inputs: what the graph is called with, once its key is asked for.
        key: the graph's key, if it has one.
        reasons: why it has none.
        error: the first thing that went wrong.
    """

    def __init__(self) -> None:
        self.inputs: Sequence[object] = ()
        self.key: str | None = None
        self.reasons: tuple[BypassReason, ...] = ()
        self.error: Exception | None = None

    def met(self, error: Exception) -> None:
        """Keep ``error``, if it is the first."""
        self.error = self.error or error


_Call = TypeVar("_Call", bound=CacheCall)


@dataclass(eq=False)
class CompileState(threading.local):
    """What this thread compiles now. Each hook sets its part, and puts back what was there.

    Attributes:
        options: what ``torch.compile(options=...)`` has asked Inductor for.
        depth: how many calls of AOTAutograd the thread is in.
        backward_compiler: what lowers backwards for the inner one.
        user_compilers: what a program has given to compile the graph by, by name of the argument.
        current: the call of torch into its cache. One may come inside of another, and ends first.
        fx_options: where an option that was set for the FX graph that is compiled is put back.
        offered: kernels of the entry that is being rebuilt.
        sources: Python code of that entry, by the path that torch gives it.
        loading: kernels of each module that is being loaded, the outer first.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    depth: int = 0
    backward_compiler: Function[Function[object]] | None = None
    user_compilers: Mapping[str, object] = field(default_factory=dict)
    current: CacheCall | None = None
    fx_options: contextlib.ExitStack | None = None
    offered: Mapping[str, Buffer] | None = None
    sources: dict[str, str] = field(default_factory=dict)
    loading: list[set[str]] = field(default_factory=list)

    @contextlib.contextmanager
    def changed(self, **values: object) -> Iterator[None]:
        """Set attributes of this thread while the block runs."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextlib.contextmanager
    def entered(self, call: _Call) -> Iterator[_Call]:
        """Make ``call`` the current one while the block runs."""
        with self.changed(current=call):
            yield call

    def install(self, patches: Patches) -> None:
        """See what Inductor and AOTAutograd are called with.

        A user's backend may call ``compile_fx`` with decompositions or an ``inner_compile`` of its
        own, or AOTAutograd with compilers of its own. The graph that is looked up does not say so.
        Programs may have ``compile_fx`` from before, so AOTAutograd itself is watched.
        """
        patches.replace(internals.compile_fx, self._inductor)
        patches.replace(internals.aot_module, self._autograd)

    def _inductor(self, original: Function[object]) -> Function[object]:
        def compile_fx(*args: object, **kwargs: object) -> object:
            asked = cast("Mapping[str, object] | None", kwargs.get("config_patches"))
            with self.changed(options={**self.options, **(asked or {})}):
                return original(*args, **kwargs)

        return compile_fx

    def _autograd(self, original: Function[object]) -> Function[object]:
        def aot_module_simplified(*args: object, **kwargs: object) -> object:
            with self.changed(
                depth=self.depth + 1,
                backward_compiler=kwargs.get("bw_compiler"),
                user_compilers=_user_compilers(kwargs),
            ):
                return original(*args, **kwargs)

        return aot_module_simplified


def _user_compilers(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    inner = internals.inner_compiler(kwargs.get("fw_compiler"))
    if inner is None:
        return {name: kwargs.get(name) for name in _COMPILERS}
    return {"inner_compile": inner, "decompositions": kwargs.get("decompositions")}


class PendingCompiles:
    """Which compiles end in an entry; a compile is known by its tracing context.

    Args:
        vouched: the version of a function or operator that the user registered.
    """

    def __init__(self, state: CompileState, vouched: Callable[[object], str | None]) -> None:
        self._state = state
        self._vouched = vouched
        # DDPOptimizer compiles several graphs in one context, one after the other.
        self._compiles: weakref.WeakKeyDictionary[TracingContext, list[Compile]] = (
            weakref.WeakKeyDictionary()
        )
        self._outputs: OrderedDict[str, list[Described] | UndescribedError] = OrderedDict()

    def install(self, patches: Patches) -> None:
        """Have torch bundle where :meth:`begin` was called, as if the option were set."""
        patches.replace(internals.should_bundle, self._or_begun)
        patches.replace(internals.should_bundle_compiled, self._or_begun)
        patches.replace(internals.compile_fx_inner, self._compiler)
        patches.replace(internals.answer_first_call, self._answerer)

    def end(self) -> None:
        """Another graph is about to be looked up."""
        context, compile_ = self._current()
        if context is not None and compile_ is not None:
            compile_.end(context)

    def begin(
        self, key: str, config: AOTConfig, inputs: Sequence[object], *, of_threads: bool
    ) -> None:
        """Note that the graph that is being traced now will be saved under ``key``.

        Args:
            of_threads: whether its code is made for the number of threads.
        """
        context = internals.current_tracing_context.get()()
        if context is not None:
            compile_ = Compile.begun(context, key, config, inputs, of_threads=of_threads)
            self._compiles.setdefault(context, []).append(compile_)

    def compile_of(self, key: str) -> Compile | None:
        """Return what is known of the compile that ends in an entry under ``key`` now."""
        context = internals.current_tracing_context.get()()
        compiles = () if context is None else self._compiles.get(context, ())
        return next((each for each in reversed(compiles) if each.key == key), None)

    def is_compiling_entry(self) -> bool:
        """Return whether what is compiled now is to become a part of an entry."""
        return self._current()[1] is not None

    def force_bundling(self) -> bool:
        """Have torch bundle the FX graph that it compiles now, if that becomes part of an entry."""
        options = self._state.fx_options
        if options is not None:
            functorch = internals.functorch_config.get()
            options.enter_context(functorch.patch(bundled_autograd_cache=True))
        return options is not None

    def outputs(self, key: str) -> list[Described] | None:
        """Return what the graph answers a fake first call with; ``None`` if there is none.

        Raises:
            UndescribedError: it cannot be described.
        """
        outputs = self._outputs.get(key)
        if isinstance(outputs, UndescribedError):
            raise outputs
        return outputs

    def _current(self) -> tuple[TracingContext | None, Compile | None]:
        context = internals.current_tracing_context.get()()
        compiles = None if context is None else self._compiles.get(context)
        return context, compiles[-1] if compiles else None

    def _or_begun(self, asked: Callable[[], bool]) -> Callable[[], bool]:
        def should_bundle_autograd_cache() -> bool:
            return self.is_compiling_entry() or asked()

        return should_bundle_autograd_cache

    def _compiler(self, compile_inner: Function[CompiledGraph]) -> Function[CompiledGraph]:
        def compile_fx_inner(gm: GraphModule, *args: object, **kwargs: object) -> CompiledGraph:
            context, compile_ = self._current()
            if context is None or compile_ is None:
                return compile_inner(gm, *args, **kwargs)
            started = time.monotonic_ns()
            info = self._fx_info(gm, compile_, is_backward=bool(kwargs.get("is_backward")))
            with contextlib.ExitStack() as options, self._state.changed(fx_options=options):
                # A graph that does nothing is not compiled at all, unless torch bundles.
                if not (internals.asks_fx_cache() and internals.count_calls.get()(gm.graph)):
                    self.force_bundling()
                graph = compile_inner(gm, *args, **kwargs)
            if info is not None:
                if not info["late"]:
                    compile_.look(context)
                attach_fx_info(graph, info)
            # torch notes it only where it does not bundle, and takes a backward's from here.
            if graph._time_taken_ns is None:
                graph._time_taken_ns = time.monotonic_ns() - started
            return graph

        return compile_fx_inner

    def _fx_info(self, gm: GraphModule, compile_: Compile, *, is_backward: bool) -> FxInfo | None:
        """Return what to note of an FX graph that is about to be lowered; else it is not saved."""
        late = is_backward and not self._state.depth
        threads, vouched = compile_.of_threads, self._vouched
        try:
            return {
                "sees_places": reads_storage_offsets(gm),
                "late": late,
                "lowered": settings_digest(of_threads=threads, registered_version=vouched)
                if late
                else None,
            }
        except Exception as exc:  # the user's program goes on
            logger.warning(
                "a graph will not be cached as a whole %s", pointer(code_of(exc)), exc_info=True
            )
            return None

    def _answerer(self, original: Function[object]) -> Function[object]:
        def post_compile(
            wrapper: FirstCallWrapper,
            *args: object,
            runtime_metadata: RuntimeMetadata,
            **kwargs: object,
        ) -> object:
            function = original(wrapper, *args, runtime_metadata=runtime_metadata, **kwargs)
            compile_ = self._current()[1]
            if wrapper.needs_post_compile and compile_ is not None:
                # In the strides that Inductor chose: the original has put them there.
                self._remember(compile_.key, wrapper, runtime_metadata)
            return function

        return post_compile

    def _remember(self, key: str, wrapper: FirstCallWrapper, metadata: RuntimeMetadata) -> None:
        try:
            self._outputs[key] = described_outputs(wrapper.out_metas, metadata)
        except UndescribedError as exc:
            self._outputs[key] = exc
        while len(self._outputs) > _REMEMBERED:
            self._outputs.popitem(last=False)
