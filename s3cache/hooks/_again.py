"""Compile again what a hit did not trace: a graph for real inputs, or the backward of an entry.

torch keeps the graph of a backward in the entry, as text.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Tracer
    from torch.fx.node import Argument, Target
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTResult, BackwardModule, Function, RuntimeMetadata


@contextlib.contextmanager
def _new_trace(metadata: RuntimeMetadata | None = None) -> Iterator[Function[object]]:
    """Set up a compile; yield a function that makes fakes of real values. Sizes are numbers."""
    import torch

    mode = internals.fake_mode.get()(shape_env=internals.shape_env.get()())
    context = internals.tracing_context.get()(mode)
    if metadata is not None:
        context.fw_metadata = metadata

    def fake(value: object) -> object:
        is_tensor = isinstance(value, torch.Tensor)
        return mode.from_tensor(value, static_shapes=True) if is_tensor else value

    with internals.tracing.get()(context), internals.inductor_state.get().set_fake_mode(mode):
        yield fake


@contextlib.contextmanager
def _without_caches(options: Mapping[str, object]) -> Iterator[None]:
    inductor, functorch = internals.inductor_config.get(), internals.functorch_config.get()
    with (
        inductor.patch(**options),
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def compile_module(
    original: Function[object],
    options: Mapping[str, object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    values: Sequence[object],
) -> Function[object]:
    """Compile a graph from Dynamo again, for real values of all its inputs.

    ``args`` and ``kwargs`` are those of AOTAutograd: the module, its inputs, the compilers.
    """
    mod, inputs = cast("Module", args[0]), cast("Sequence[object]", args[1])
    first = len(values) - len(inputs)  # before them are its own parameters
    with (
        _without_caches(options),
        internals.functorch_config.get().patch(unlift_effect_tokens=True),  # as compile_fx does
        _new_trace() as fake,
    ):
        fakes = [fake(value) for value in values[first:]]
        compiled = cast("Function[object]", original(mod, fakes, *args[2:], **kwargs))
    takes_list = internals.graph_module_of(mod) is not mod
    return lambda given: compiled(given[first:]) if takes_list else compiled(*given[first:])


def compile_graph(
    options: Mapping[str, object],
    gm: GraphModule,
    metadata: RuntimeMetadata | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    values: Sequence[object],
) -> Function[object]:
    """Compile an FX graph again, for real values of its inputs."""
    with _without_caches(options), _new_trace(metadata) as fake:
        fakes = [fake(value) for value in values]
        compile_again: Function[Function[object]] = internals.compile_fx_graph.get()
        return compile_again(internals.copy_graph(gm), fakes, *args, **kwargs)


def lower_backward(
    entry: AOTResult, compiler: Function[Function[object]] | None, values: Sequence[object]
) -> Function[object]:
    """Lower the backward of ``entry`` for real values; without a compiler, interpret it."""
    if compiler is None:
        return interpreted_backward(entry)
    with _new_trace(entry.runtime_metadata) as fake:
        return compiler(_as_serialized(entry), [fake(value) for value in values])


def interpreted_backward(entry: AOTResult) -> Function[object]:
    """Return a function that runs the backward of ``entry`` uncompiled, operator by operator."""
    import torch

    module = _as_serialized(entry)

    def run(args: list[object]) -> object:
        values = list(args)
        args.clear()
        with torch.no_grad():
            return module(*values)

    return internals.boxed(run)


def _as_serialized(entry: AOTResult) -> GraphModule:
    module = entry.serialized_bw_module
    traced = _traced(module)
    traced.graph._tracer_cls = cast("type | None", module.args[0].get("_tracer_cls"))
    return traced


def deserialize_backward(original: Function[object], module: BackwardModule) -> object:
    """Rebuild the graph of a backward from its text, with a tracer that sees every operator.

    torch's own tracing sees an operator only if one of its direct arguments is a proxy. So it fails
    on ``expand(x, [6, s0])``. It also runs operators without arguments from the graph at once: a
    backward that draws random numbers would use the same numbers in every step.
    """
    if module.args[0].get("_tracer_cls") is not None:
        return original(module)  # not from AOTAutograd: torch's tracer handles it
    return _traced(module)


def _traced(module: BackwardModule) -> GraphModule:
    body, *others = module.args
    # In a copy: the program may ask for it more than once.
    traced: GraphModule = module.fn({**body, "_tracer_cls": _every_operator()}, *others)
    return traced


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
            func: Target,
            types: object,
            args: tuple[Argument, ...] = (),
            kwargs: dict[str, Argument] | None = None,
        ) -> object:
            if isinstance(func, internals.operator.get()):
                return self._tracer.create_proxy("call_function", func, args, kwargs or {})
            return cast("Function[object]", func)(*args, **(kwargs or {}))

    class EveryOperator(Tracer):
        def trace(
            self, root: Module | Function[object], concrete_args: dict[str, object] | None = None
        ) -> Graph:
            with Recording(self):
                return super().trace(root, concrete_args)

    return EveryOperator
