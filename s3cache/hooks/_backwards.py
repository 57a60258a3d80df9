"""The seam at backwards that are lowered when they are first called, under the settings of then.

torch lowers most of them so: a program whose settings are strict at ``.backward()`` gets a strict
backward, whatever they were at the forward. A key is made at the forward. So an entry says what its
backward was lowered under; a hit compares that at the first call of its own backward, and if it
differs has the backward lowered here and now, from the graph that torch keeps in the entry.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from s3cache._logs import logger_of
from s3cache.graph import settings_digest
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.hooks._conditions import Conditions
    from s3cache.torch_api.protocols import AOTResult, BackwardModule, Function, RuntimeMetadata

__all__ = ["Backwards"]

logger = logger_of("lookups")


class _Thread(threading.local):
    """The call of AOTAutograd that this thread is in, if any.

    Attributes:
        depth: how many of them it is in.
        options: what ``torch.compile(options=...)`` has asked for.
        compiler: what lowers backwards for it.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.options: Mapping[str, object] = {}
        self.compiler: Function[Function[object]] | None = None


class Backwards:
    """Knows what lowers backwards, and has those of hits lowered anew where they do not fit.

    Attributes:
        vouched: the version of a function or operator that the user vouched for.
    """

    def __init__(self, vouched: Callable[[object], str | None]) -> None:
        self.vouched = vouched
        self._thread = _Thread()

    def install(self, patches: Patches) -> None:
        """See what Inductor and AOTAutograd are called with."""
        patches.replace(internals.compile_fx, self._inductor)
        patches.replace(internals.aot_module, self._autograd)

    def _inductor(self, original: Function[object]) -> Function[object]:
        def compile_fx(*args: object, **kwargs: object) -> object:
            outer = self._thread.options
            asked = cast("Mapping[str, object] | None", kwargs.get("config_patches"))
            self._thread.options = {**outer, **(asked or {})}
            try:
                return original(*args, **kwargs)
            finally:
                self._thread.options = outer

        return compile_fx

    def _autograd(self, original: Function[object]) -> Function[object]:
        def aot_module_simplified(*args: object, **kwargs: object) -> object:
            outer = self._thread.compiler
            given = kwargs.get("bw_compiler")
            self._thread.compiler = cast("Function[Function[object]] | None", given)
            self._thread.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._thread.compiler = outer
                self._thread.depth -= 1

        return aot_module_simplified

    def are_late(self) -> bool:
        """Whether a backward that is lowered now is so for its first call."""
        return not self._thread.depth

    def attach(self, entry: AOTResult, conditions: Conditions) -> None:
        """Have the callable that ``entry`` is about to become compare at its first backward."""
        half = entry.compiled_bw
        if half is None or conditions["lowered"] is None:
            return
        late = _LateBackward(
            entry, conditions, self._thread.options, self._thread.compiler, self.vouched
        )
        load = half.post_compile

        def post_compile(*args: object, **kwargs: object) -> Function[object]:
            return late.over(load(*args, **kwargs))

        half.post_compile = post_compile


class _LateBackward:
    """The backward of one hit, until its first call."""

    def __init__(
        self,
        entry: AOTResult,
        conditions: Conditions,
        options: Mapping[str, object],
        compiler: Function[Function[object]] | None,
        vouched: Callable[[object], str | None],
    ) -> None:
        self._vouched = vouched
        self._module = entry.serialized_bw_module
        self._metadata = entry.runtime_metadata
        self._conditions = conditions
        self._options = dict(options)
        self._compiler = compiler
        # Memory of inputs that the code reuses, which torch refuses to do where a graph is kept
        # for another backward: it asks before the first call.
        self._donated = self._metadata.bw_donated_idxs
        if self._donated:
            self._metadata.bw_donated_idxs = []

    def over(self, lowered: Function[object]) -> Function[object]:
        """What calls ``lowered``, or what is lowered in its place."""
        chosen: Function[object] | None = None

        def backward(args: list[object]) -> object:
            nonlocal chosen
            if chosen is None:
                chosen = self._chosen(lowered, args)
            return chosen(args)

        return internals.disable_dynamo.get()(
            internals.boxed(backward), reason="do not trace generated backwards pass"
        )

    def _chosen(self, lowered: Function[object], args: Sequence[object]) -> Function[object]:
        kept = bool(self._donated) and internals.keeps_graph.get()()
        if not kept:
            self._metadata.bw_donated_idxs = self._donated
        try:
            if not kept and self._settings() == self._conditions["lowered"]:
                return lowered
            logger.info("a backward of a hit is lowered anew, under the settings of now")
            return self._lowered_now(args)
        except Exception:  # the user's program goes on
            logger.warning(
                "a backward of a hit cannot be lowered anew; it runs uncompiled",
                exc_info=True,
            )
            return internals.interpreted(_as_serialized(self._module))

    def _settings(self) -> str | None:
        """What torch would lower it under now."""
        inductor = internals.inductor_config.get()
        with contextlib.ExitStack() as stack:
            stack.enter_context(inductor.patch(**self._options))
            if inductor.cpp_wrapper:
                stack.enter_context(inductor.patch(**internals.cpp_wrapper_options.get()()))
            of_threads = self._conditions["of_threads"]
            return settings_digest(of_threads=of_threads, vouched=self._vouched)

    def _lowered_now(self, args: Sequence[object]) -> Function[object]:
        assert self._compiler is not None
        with _tracing_anew(self._metadata) as fake:
            inputs = [fake(value) for value in args]
            return self._compiler(_as_serialized(self._module), inputs)


def _as_serialized(module: BackwardModule) -> GraphModule:
    """The graph with all its nodes.

    torch makes it by tracing its code, and what has no inputs (a tensor of zeros, a seed) is then
    called once, there, and its result put in as a constant.
    """
    body, imports = module.args
    found = module.fn({**body, "_tracer_cls": _tracer_of_all()}, imports)
    found.graph._tracer_cls = cast("type | None", body.get("_tracer_cls"))
    return found


@functools.cache
def _tracer_of_all() -> type:
    from torch.fx import Graph, Proxy, Tracer
    from torch.overrides import TorchFunctionMode

    operator = internals.operator.get()

    class Recording(TorchFunctionMode):
        def __init__(self, tracer: Tracer) -> None:
            super().__init__()
            self._tracer = tracer

        def __torch_function__(
            self,
            func: Function[object],
            types: object,
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            kwargs = dict(kwargs or {})
            inputs = internals.tree_leaves.get()((args, kwargs))
            is_traced = any(isinstance(each, Proxy) for each in inputs)
            if is_traced or not isinstance(cast("object", func), operator):
                return func(*args, **kwargs)
            return self._tracer.create_proxy("call_function", func, args, kwargs)

    class TracerOfAll(Tracer):
        def trace(self, root: object, concrete_args: dict[str, object] | None = None) -> Graph:
            with Recording(self):
                return super().trace(cast("Module", root), concrete_args)

    return TracerOfAll


@contextlib.contextmanager
def _tracing_anew(metadata: RuntimeMetadata) -> Iterator[Function[object]]:
    """What a compile needs around it; gives what makes fakes of real values. Sizes are numbers."""
    import torch

    mode = internals.fake_mode.get()(shape_env=internals.shape_env.get()())
    context = internals.tracing_context.get()(mode)
    context.fw_metadata = metadata

    def fake(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return mode.from_tensor(value, static_shapes=True)

    with internals.tracing.get()(context):
        yield fake
