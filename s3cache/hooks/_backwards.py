"""Backwards of hits: those that are lowered late, and those that compiled autograd asks for.

torch lowers most backwards when they are first called, under the settings of that moment: a program
whose settings are strict at ``.backward()`` gets a strict backward, whatever they were at the
forward. A key is made at the forward. So an entry says what its backward was lowered under; a hit
compares that at the first call of its own backward, and if it differs has the backward lowered here
and now, from the graph that torch keeps in the entry.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from s3cache.graph import settings_digest
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Tracer
    from torch.fx.node import Argument, Target
    from torch.nn import Module

    from s3cache.hooks._conditions import Conditions
    from s3cache.hooks._state import CompileState
    from s3cache.torch_api.protocols import AOTResult, BackwardModule, Function, RuntimeMetadata

logger = logger_of("lookups")


def deserialize_backward(original: Function[object], module: BackwardModule) -> object:
    """Make the graph of a backward from its text by a tracer that sees every operator.

    Compiled autograd asks a hit for that graph. torch traces the text by plain tracing, which sees
    an operator only by a proxy among its arguments, right there: of ``expand(x, [6, s0])`` it makes
    an error, and it runs what has no arguments of the graph, so that a backward which draws random
    numbers would have the same ones in every step.
    """
    if module.args[0].get("_tracer_cls") is not None:
        return original(module)  # not AOTAutograd's: its own tracer knows how
    return _traced(module)


def attach_backward(
    entry: AOTResult,
    conditions: Conditions,
    state: CompileState,
    registered_version: Callable[[object], str | None],
) -> None:
    """Have the callable that ``entry`` is about to become compare at its first backward."""
    compiled = entry.compiled_bw
    if compiled is None or conditions["lowered"] is None:
        return
    deferred = _DeferredBackward(entry, conditions, state, registered_version)
    load = compiled.post_compile

    def post_compile(*args: object, **kwargs: object) -> Function[object]:
        return deferred.over(load(*args, **kwargs))

    compiled.post_compile = post_compile


class _DeferredBackward:
    """The backward of one hit, until its first call."""

    def __init__(
        self,
        entry: AOTResult,
        conditions: Conditions,
        state: CompileState,
        registered_version: Callable[[object], str | None],
    ) -> None:
        self._registered_version = registered_version
        self._module = entry.serialized_bw_module
        self._metadata = entry.runtime_metadata
        self._conditions = conditions
        self._options = dict(state.options)  # of the forward's compile
        self._compiler = state.backward_compiler
        # Memory of inputs that the code reuses, which torch refuses to do where a graph is kept
        # for another backward: it asks before the first call.
        self._donated = self._metadata.bw_donated_idxs
        if self._donated:
            self._metadata.bw_donated_idxs = []

    def over(self, lowered: Function[object]) -> Function[object]:
        """Return a function that calls ``lowered``, or what is lowered in its place."""
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
            logger.info("a backward of a hit is lowered again, under the settings of now")
            return self._lowered_now(args)
        except Exception:  # the user's program goes on
            logger.warning(
                "a backward of a hit cannot be lowered again; it runs uncompiled",
                exc_info=True,
            )
            return internals.interpreted(_as_serialized(self._module))

    def _settings(self) -> str | None:
        """Return a digest of the settings that torch would lower it under now."""
        inductor = internals.inductor_config.get()
        with contextlib.ExitStack() as stack:
            stack.enter_context(inductor.patch(**self._options))
            if inductor.cpp_wrapper:
                stack.enter_context(inductor.patch(**internals.cpp_wrapper_options.get()()))
            return settings_digest(
                of_threads=self._conditions["of_threads"],
                registered_version=self._registered_version,
            )

    def _lowered_now(self, args: Sequence[object]) -> Function[object]:
        assert self._compiler is not None
        with _new_trace(self._metadata) as fake:
            inputs = [fake(value) for value in args]
            return self._compiler(_as_serialized(self._module), inputs)


def _as_serialized(module: BackwardModule) -> GraphModule:
    found = _traced(module)
    found.graph._tracer_cls = cast("type | None", module.args[0].get("_tracer_cls"))
    return found


def _traced(module: BackwardModule) -> GraphModule:
    body, *rest = module.args
    # In a copy: the program may ask for it more than once.
    return module.fn({**body, "_tracer_cls": _every_operator()}, *rest)


@functools.cache
def _every_operator() -> type[Tracer]:
    from torch.fx import Tracer
    from torch.overrides import TorchFunctionMode

    class Recording(TorchFunctionMode):
        def __init__(self, tracer: Tracer) -> None:
            super().__init__()
            self._tracer = tracer

        def __torch_function__(
            self,
            func: object,
            types: object,
            args: tuple[Argument, ...] = (),
            kwargs: Mapping[str, Argument] | None = None,
        ) -> object:
            if isinstance(func, internals.operator.get()):
                return self._tracer.create_proxy(
                    "call_function", cast("Target", func), args, {**(kwargs or {})}
                )
            return cast("Function[object]", func)(*args, **(kwargs or {}))

    class EveryOperator(Tracer):
        def trace(
            self,
            root: Module | Function[object],
            concrete_args: dict[str, object] | None = None,
        ) -> Graph:
            with Recording(self):
                return super().trace(root, concrete_args)

    return EveryOperator


@contextlib.contextmanager
def _new_trace(metadata: RuntimeMetadata) -> Iterator[Function[object]]:
    """Set up a compile; yield a function that makes fakes of real values. Sizes are numbers."""
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
