"""Compile a graph again, for real values of its inputs and without a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import Function, RuntimeMetadata


@contextlib.contextmanager
def new_trace(metadata: RuntimeMetadata | None = None) -> Iterator[Function[object]]:
    """Set up a compile; yield a function that makes fakes of real values. Sizes are numbers."""
    import torch

    mode = internals.fake_mode.get()(shape_env=internals.shape_env.get()())
    context = internals.tracing_context.get()(mode)
    if metadata is not None:
        context.fw_metadata = metadata

    def fake(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return mode.from_tensor(value, static_shapes=True)

    fake.mode = mode  # type: ignore[attr-defined]
    with internals.tracing.get()(context):
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
        new_trace() as fake,
        internals.inductor_state.get().set_fake_mode(fake.mode),  # type: ignore[attr-defined]
    ):
        fakes = [fake(value) for value in values[first:]]
        compiled = cast("Function[object]", original(mod, fakes, *args[2:], **kwargs))
    takes_list = internals.graph_module_of(mod) is not mod

    def call(given: list[object]) -> object:
        own = given[first:]
        return compiled(own) if takes_list else compiled(*own)

    return call


def compile_graph(
    options: Mapping[str, object],
    gm: GraphModule,
    metadata: RuntimeMetadata,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    values: Sequence[object],
) -> Function[object]:
    """Compile an FX graph again, for real values of its inputs."""
    with _without_caches(options), new_trace(metadata) as fake:
        fakes = [fake(value) for value in values]
        compile_again: Function[Function[object]] = internals.compile_fx_graph.get()
        return compile_again(internals.copied(gm), fakes, *args, **kwargs)
