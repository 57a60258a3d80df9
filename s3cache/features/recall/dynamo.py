"""Convert Dynamo's frames to plain data and back: sources, guards and bytecode.

This is recall's only adapter to torch. If a release lacks a name that it needs, recall is off, and
a warning says so.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

from s3cache.features.recall import names
from s3cache.features.recall.sources import Plain, Source
from s3cache.torch_api import internals

#: Dynamo's result for a frame, during the trace.
OutputGraph: TypeAlias = Any

#: Prefixes of global names that Dynamo installs.
COMPILED, RESUME, IMPORT = "__compiled_fn", "__resume_at", "__import_"


def varies_by_history(graph: OutputGraph, reads: Iterable[tuple[Source, object]]) -> bool:
    """Return whether sizes vary that changed in earlier calls, and that the user has not marked.

    Numbers may vary: the walk looks at them.
    """
    import torch

    shapes = graph.shape_env
    changed = {
        symbol
        for symbol, _ in getattr(shapes, "exclusion_constraints", ())
        if any(".size()[" in str(source) for source in shapes.var_to_sources.get(symbol, ()))
    }
    marked = {
        f"{source.name}.size()[{dim}]"
        for source, value in reads
        if isinstance(value, torch.Tensor)
        for dim in getattr(value, names.DYNAMIC_DIMS, ())
    }
    known = {var for source, var in shapes.source_to_var.items() if str(source) in marked}
    return not changed <= known


# -- frames


def guarded_code(result: Any) -> types.CodeType | None:
    """Return the compiled code of a frame; None if it was not compiled."""
    found = getattr(result, "guarded_code", None)
    return None if found is None else found.code


def install(
    code: types.CodeType,
    original: types.CodeType,
    scope: dict[str, object],
    values: Mapping[str, object],
    guards: Any,
    compile_id: object,
) -> object:
    """Install generated code and its global names; return what Dynamo returns for a frame."""
    names.original_codes.get()[code] = original
    names.output_codes.get().add(code)
    clean = names.cleanup_hook.get()
    names.cleanups.get()[code] = [clean(scope, name, value) for name, value in values.items()]
    label = f"Torch-Compiled Region: {compile_id}"
    result = names.guarded_code.get()(code, guards, compile_id, label)
    return cast("object", names.wrap_guarded_code.get()(result))


def constant_row(value: object) -> list[Any] | None:
    """Return a constant of torch in bytecode as plain data; None for any other."""
    import torch

    if type(value) is torch.Size:
        return ["Size", *value] if all(type(each) is int for each in value) else None
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return ["name", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    return None


def constant_of(row: Any) -> object:
    """Return the constant of a row of :func:`constant_row`."""
    import torch

    kind, *values = row
    if kind == "Size":
        return torch.Size(values)
    return torch.device(*values) if kind == "device" else getattr(torch, values[0])


# -- the state of the process and of a compile


def state_of_process() -> tuple[Any, str] | None:
    """Return the state of torch that guards check, also as text; None if it is unusual.

    It is unusual under :func:`is_under_modes`, a stance, compiled autograd, a hook on bytecode, a
    profiler or a debugger: then no frame is recalled.
    """
    unusual = (
        is_under_modes()
        or names.stance.get().stance != "default"
        or names.in_compiled_autograd.get()
        or names.bytecode_hooks.get()
        or names.profiler_enabled.get()()
        or sys.gettrace() is not None
        or sys.getprofile() is not None
    )
    if unusual:
        return None
    state = names.state_guard.get()()
    return state, f"{state.__getstate__()} {names.error_on_graph_break.get()()}"


def is_under_modes() -> bool:
    """Return whether a mode for functions or dispatch, a transform, or a saving hook is active."""
    return bool(
        names.function_modes.get()() > 0
        # Inside a compile, Dynamo has disabled the modes, so none is current.
        or names.in_dispatch_mode.get()()
        or names.dispatch_modes.get()() > 0
        or names.functorch_layer.get()() is not None
        or names.dual_level.get() >= 0
        or names.saving_hooks.get()(True) is not None
    )


def state_text(state: Any) -> str:
    """Return the given, or else the current, state of torch that guards check, as text."""
    return str((state or names.state_guard.get()()).__getstate__())


def global_hooks() -> list[dict[object, object]]:
    """Return the hooks for all modules, by kind."""
    tables = vars(names.modules.get())
    return [
        table
        for name, table in sorted(tables.items())
        if name.startswith("_global_") and isinstance(table, dict)
    ]


def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; code may depend on both."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def accelerators() -> str:
    """Return the properties of this machine's accelerators that traced code may read."""
    import torch

    properties: list[object] = [names.private_device.get()(), names.cudnn_enabled.get()()]
    for module in (torch.accelerator, torch.xpu, torch.mps, torch.mtia):
        properties.append(module.is_available())
    if torch.xpu.is_available():
        properties += map(torch.xpu.get_device_properties, range(torch.xpu.device_count()))
    cuda: Any = torch.cuda
    if torch.version.cuda or torch.version.hip:
        properties.append(cuda.is_available())
        if cuda.is_initialized():
            device = internals.current_device("cuda")
            properties += [cuda.device_count(), device, internals.device_properties(device)]
    return str(properties)


def uses_accelerator() -> bool:
    """Return whether this process uses an accelerator; none is initialized by the question."""
    import torch

    lazy: tuple[Any, ...] = torch.cuda, torch.xpu
    return any(each.is_initialized() for each in lazy) or torch.mps.is_available()


def note_sizes(code: types.CodeType, closure: object, values: Iterable[tuple[str, object]]) -> None:
    """Record sizes and numbers of inputs in Dynamo by name, as if it had traced them."""
    seen = _seen(code, closure)
    for name, value in () if seen is None else values:
        if (entry := _size_entry(name, value)) is not None:
            seen[name] |= entry


def _seen(code: types.CodeType, closure: object) -> Any:
    """Return the sizes that Dynamo has seen in a frame, by name; None if it does not use them."""
    if not names.automatic_dynamic.get():
        return None
    return names.code_state.get()()[names.code_id.get().make(code, closure)].automatic_dynamic


def _size_entry(name: str, value: object) -> Any:
    """Return what Dynamo would record of an input; None if nothing."""
    import torch

    if isinstance(value, torch.Tensor):
        # While ranks compare sizes, Dynamo returns the entry without merging it into others.
        table = types.SimpleNamespace(automatic_dynamic={})
        state = types.SimpleNamespace(all_states=None, local_state=table)
        trace = types.SimpleNamespace(distributed_state=state)
        entry = names.record_automatic_dynamic.get()(trace, name, value)
        for dim in getattr(value, names.DYNAMIC_DIMS, ()):  # marked by the user
            marks = [names.auto_unset.get()] * value.dim()
            marks[dim] = names.auto_dynamic.get()
            entry |= names.size_entry.get().make_size(size=marks)
        return entry
    if type(value) in (int, float):
        return names.size_entry.get().make_scalar(value)
    return None


def varying(code: types.CodeType, closure: object, name: str, value: object) -> list[str]:
    """Return what Dynamo would let vary of an input, after this and earlier calls.

    It is ``number``, or ``size`` and ``stride`` with a dimension of a tensor.
    """
    seen, entry = _seen(code, closure), _size_entry(name, value)
    if seen is None or entry is None or name not in seen:
        return []
    merged = copy.copy(seen[name])
    merged |= entry
    if type(value) in (int, float):
        return ["number"] if merged.scalar is names.auto_dynamic.get() else []
    tensor: Any = value
    static = getattr(tensor, names.STATIC_DIMS, ())
    return [
        f"{what} {dim}"
        for what, is_dynamic in (
            ("size", merged.is_size_dynamic),
            ("stride", merged.is_stride_dynamic),
        )
        for dim in range(tensor.dim())
        if dim not in static and is_dynamic(dim)
    ]


def unwrapped(backend: Any) -> tuple[Any, Any]:
    """Return the optimizer of DDP around a backend, or None; and the backend itself."""
    while (inner := getattr(backend, names.ORIGINAL_BACKEND, None)) is not None:
        backend = inner
    ddp: Any = getattr(backend, "__self__", None)
    if type(ddp).__name__ == "DDPOptimizer":
        return ddp, unwrapped(ddp.backend_compile_fn)[1]
    return None, backend


def compiler_of(backend: object) -> Plain | None:
    """Return the mode and options of an Inductor backend; None for other backends."""
    ddp, inductor = unwrapped(backend)
    if type(inductor) is not names.inductor_wrapper.get():
        return None
    options = sorted((name, repr(value)) for name, value in inductor.config.items())
    own = ["inductor", options, repr(inductor.dynamic)]
    return own if ddp is None else ["ddp", ddp.bucket_bytes_cap, ddp.first_bucket_cap, own]


def options_of_dynamo() -> str | None:
    """Return the options of Dynamo as text; None if one of them has none."""
    own = internals.options_text(names.dynamo_options.get())
    # Names and values of inputs with sizes that may change.
    common = sorted(names.common_options.get()().items())
    sizes = [each for each in common if each[0].startswith(("dynamic_", "unbacked_"))]
    # An environment variable decides, at its first use.
    tensorifies = names.tensorifies.expected and names.tensorifies.get()()
    return None if own is None else f"{own}\n{sizes}\n{tensorifies}"
