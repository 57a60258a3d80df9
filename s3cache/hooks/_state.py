"""Replaced functions, the compile under way on each thread, and compiles that end in an entry.

Between a lookup that misses and the save, torch compiles the graph's forward and backward. With
``bundled_autograd_cache`` one entry holds a whole graph, which must be so for the graphs that
s3cache saves and for no others. The option cannot simply be set: it would be part of torch's key,
options are set for one thread only, and Inductor would ignore its cache of FX graphs, the second
level here. It is set only for an FX graph that Inductor does not cache by itself.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, TypeVar, cast

from s3cache.errors import code_of
from s3cache.graph import ORIGINAL_ATTR, BypassReason, reads_storage_offsets, settings_digest
from s3cache.hooks._conditions import FX_INFO, Compile, FxInfo, NotSharableError
from s3cache.store import Buffer
from s3cache.torch_api import Internal, internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.hooks._distributed import OutputDescription
    from s3cache.torch_api.protocols import (
        AOTConfig,
        CompiledGraph,
        FirstCallWrapper,
        RuntimeMetadata,
        TracingContext,
    )

logger = logger_of("saves")

F = TypeVar("F", bound=Function[object])
T = TypeVar("T")
_Method = TypeVar("_Method", bound=Function[object])

_ABSENT = object()
_MARK = "s3cache_around"
# As many keys as there may be between a lookup that misses and the save.
_MAX_REMEMBERED = 1024
# Arguments by which AOTAutograd compiles a graph other than by Inductor.
_COMPILERS = ("bw_compiler", "decompositions", "fw_compiler", "inference_compiler", "partition_fn")


def around(*functions: Internal[F]) -> Callable[[_Method], _Method]:
    """Mark a method as a hook: :meth:`Patches.install` puts it in the place of these functions.

    It is called with the original function, and then with what that is called with.
    """

    def mark(method: _Method) -> _Method:
        vars(method)[_MARK] = functions
        return method

    return mark


class Patches:
    """Stack of replaced functions."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def install(self, hooks: object) -> None:
        """Install every hook of an object, see :func:`around`."""
        for name in dir(type(hooks)):
            for function in getattr(getattr(type(hooks), name), _MARK, ()):
                self.wrap(function, getattr(hooks, name))

    def wrap(self, internal: Internal[F], around: Function[object]) -> None:
        """Have ``around(original, *args, **kwargs)`` called in the place of a function."""

        def make(original: F) -> F:
            def replacement(*args: object, **kwargs: object) -> object:
                return around(original, *args, **kwargs)

            return cast("F", replacement)

        self.replace(internal, make)

    def replace(self, internal: Internal[F], make: Callable[[F], F]) -> None:
        """Replace a function by what ``make`` returns for it.

        ``make`` gets and returns the plain function. A static or class method stays one.
        """
        owner, name = internal.owner()
        present = inspect.getattr_static(owner, name)
        wrapped = isinstance(present, (staticmethod, classmethod))
        original: F = present.__func__ if wrapped else present
        replacement: object = make(original)
        if isinstance(replacement, FunctionType):  # keys describe a user's original as before
            vars(replacement)[ORIGINAL_ATTR] = original
        old = vars(owner).get(name, _ABSENT)  # absent where the owner inherits it
        setattr(owner, name, type(present)(replacement) if wrapped else replacement)
        self._undo.append(
            partial(delattr, owner, name) if old is _ABSENT else partial(setattr, owner, name, old)
        )

    def set(self, internal: Internal[T], value: T) -> None:
        """Set an option of torch's."""
        owner, name = internal.owner()
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def at_undo(self, call: Callable[[], object]) -> None:
        """Call ``call`` in :meth:`undo`, in its turn."""
        self._undo.append(call)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()


@dataclass(eq=False)
class CacheCall:
    """One call of torch into its cache, from start to end.

    torch swallows what its cache raises. The first error is kept here, so that strict mode can
    raise it where torch does not swallow errors any more.
    """

    inputs: Sequence[object] = ()  # of the graph, once its key is computed
    key: str | None = None  # of the graph, if it has one
    reasons: tuple[BypassReason, ...] = ()  # why it has none
    error: Exception | None = None  # the first thing that went wrong
    kernels: Mapping[str, Buffer] | None = None  # of the entry that is being rebuilt, if one is
    modules: dict[str, str] = field(default_factory=dict)  # its Python code, by torch's paths

    def record_error(self, error: Exception) -> None:
        """Keep ``error`` if it is the first."""
        self.error = self.error or error


_Call = TypeVar("_Call", bound=CacheCall)


@dataclass(eq=False)
class CompileState(threading.local):
    """State of the compile under way on this thread; each hook sets its fields and resets them."""

    # What ``torch.compile(options=...)`` has asked Inductor for.
    options: Mapping[str, object] = field(default_factory=dict)
    depth: int = 0  # how many calls of AOTAutograd the thread is in
    backward_compiler: Function[Function[object]] | None = None  # of the innermost one
    # What a program has given to compile the graph by, by name of the argument.
    user_compilers: Mapping[str, object] = field(default_factory=dict)
    # The call of torch into its cache. One may come inside another, and ends first.
    current: CacheCall | None = None
    # Puts back an option that was set for the FX graph that is compiled.
    fx_options: contextlib.ExitStack | None = None
    # Kernels of each module that is being loaded, the outermost first.
    loading: list[set[str]] = field(default_factory=list)

    @property
    def rebuilding(self) -> CacheCall | None:
        """The current call if it rebuilds an entry of ours."""
        current = self.current
        return None if current is None or current.kernels is None else current

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

    @around(internals.compile_fx)
    def _compile_fx(self, original: Function[object], *args: object, **kwargs: object) -> object:
        asked = cast("Mapping[str, object] | None", kwargs.get("config_patches"))
        with self.changed(options={**self.options, **(asked or {})}):
            return original(*args, **kwargs)

    # A user's backend may call compile_fx or AOTAutograd with compilers or decompositions of its
    # own, which the graph does not show. Programs may have imported compile_fx before.
    @around(internals.aot_module)
    def _aot_module(self, original: Function[object], *args: object, **kwargs: object) -> object:
        inner = internals.inner_compiler(kwargs.get("fw_compiler"))
        if inner is None:
            given = {name: kwargs.get(name) for name in _COMPILERS}
        else:
            given = {"inner_compile": inner, "decompositions": kwargs.get("decompositions")}
        with self.changed(
            depth=self.depth + 1,
            backward_compiler=kwargs.get("bw_compiler"),
            user_compilers=given,
        ):
            return original(*args, **kwargs)


class PendingCompiles:
    """Compiles that end in an entry, each known by its tracing context."""

    def __init__(self, state: CompileState, version_of: Callable[[object], str | None]) -> None:
        self._state = state
        self._version_of = version_of
        # DDPOptimizer compiles several graphs in one context, one after the other.
        self._compiles: weakref.WeakKeyDictionary[TracingContext, list[Compile]] = (
            weakref.WeakKeyDictionary()
        )
        self._outputs: OrderedDict[str, list[OutputDescription] | NotSharableError] = OrderedDict()

    def end(self) -> None:
        """End the current compile: another graph is about to be looked up."""
        context, compile_ = self._current()
        if context is not None and compile_ is not None:
            compile_.end(context)

    def begin(
        self, key: str, config: AOTConfig, inputs: Sequence[object], *, of_threads: bool
    ) -> None:
        """Note that the graph that is being traced will be saved under ``key``."""
        context = internals.current_tracing_context.get()()
        if context is not None:
            compile_ = Compile(context, key, config, inputs, of_threads=of_threads)
            self._compiles.setdefault(context, []).append(compile_)

    def compile_of(self, key: str) -> Compile | None:
        """Return the compile that ends in an entry under ``key``."""
        context = internals.current_tracing_context.get()()
        compiles = () if context is None else self._compiles.get(context, ())
        return next((each for each in reversed(compiles) if each.key == key), None)

    def is_compiling_entry(self) -> bool:
        """Return whether what is compiled now will be part of an entry."""
        return self._current()[1] is not None

    def force_bundling(self) -> bool:
        """Have torch bundle the current FX graph if it will be part of an entry."""
        options = self._state.fx_options
        if options is not None:
            functorch = internals.functorch_config.get()
            options.enter_context(functorch.patch(bundled_autograd_cache=True))
        return options is not None

    def outputs(self, key: str) -> list[OutputDescription] | None:
        """Return what the graph answers a fake first call with; ``None`` if there is none."""
        outputs = self._outputs.get(key)
        if isinstance(outputs, NotSharableError):
            raise outputs
        return outputs

    def _current(self) -> tuple[TracingContext | None, Compile | None]:
        context = internals.current_tracing_context.get()()
        compiles = None if context is None else self._compiles.get(context)
        return context, compiles[-1] if compiles else None

    @around(internals.should_bundle, internals.should_bundle_compiled)
    def _should_bundle(self, asked: Callable[[], bool]) -> bool:
        return self.is_compiling_entry() or asked()

    @around(internals.compile_fx_inner)
    def _compile_graph(
        self, original: Function[CompiledGraph], gm: GraphModule, *args: object, **kwargs: object
    ) -> CompiledGraph:
        context, compile_ = self._current()
        if context is None or compile_ is None:
            return original(gm, *args, **kwargs)
        started = time.monotonic_ns()
        info = self._fx_info(gm, compile_, is_backward=bool(kwargs.get("is_backward")))
        with contextlib.ExitStack() as options, self._state.changed(fx_options=options):
            # A graph that does nothing is not compiled at all, unless torch bundles.
            if not (internals.asks_fx_cache() and internals.count_calls.get()(gm.graph)):
                self.force_bundling()
            graph = original(gm, *args, **kwargs)
        if info is not None:
            if not info["late"]:
                compile_.look(context)
            setattr(graph, FX_INFO, info)
        # torch notes it only where it does not bundle, and takes a backward's from here.
        if graph._time_taken_ns is None:
            graph._time_taken_ns = time.monotonic_ns() - started
        return graph

    def _fx_info(self, gm: GraphModule, compile_: Compile, *, is_backward: bool) -> FxInfo | None:
        """Return what to note of an FX graph that will be lowered; ``None`` if it cannot be."""
        late = is_backward and not self._state.depth
        try:
            lowered = None
            if late:
                lowered = settings_digest(
                    of_threads=compile_.of_threads, registered_version=self._version_of
                )
            return {"sees_places": reads_storage_offsets(gm), "late": late, "lowered": lowered}
        except Exception as exc:  # the user's program goes on
            logger.warning(
                "a graph will not be cached as a whole %s", pointer(code_of(exc)), exc_info=True
            )
            return None

    @around(internals.answer_first_call)
    def _answer_first_call(
        self,
        original: Function[object],
        wrapper: FirstCallWrapper,
        *args: object,
        runtime_metadata: RuntimeMetadata,
        **kwargs: object,
    ) -> object:
        function = original(wrapper, *args, runtime_metadata=runtime_metadata, **kwargs)
        compile_ = self._current()[1]
        if wrapper.needs_post_compile and compile_ is not None:
            from s3cache.hooks._distributed import describe_outputs

            # In the strides that Inductor chose: the original has put them there.
            outputs: list[OutputDescription] | NotSharableError
            try:
                outputs = describe_outputs(wrapper.out_metas, runtime_metadata)
            except NotSharableError as exc:
                outputs = exc
            self._outputs[compile_.key] = outputs
            while len(self._outputs) > _MAX_REMEMBERED:
                self._outputs.popitem(last=False)
        return function
