"""All changes. Each changed program differs from its base program in one thing."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor
from torch._inductor import codecache
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.equal.changes.arguments import OPERATORS
from tests.equal.changes.bases import BASES, Mlp, mlp, pointwise
from tests.equal.programs import Context, Pair, Program, once
from tests.support.switches import attribute, deterministic, switched, threads


def changes() -> Iterator[Pair]:
    """Yield every change of a base program, in a fixed order."""
    yield from (*_arguments(), *_inputs(), *_settings(), *_configs(), *_constants())


def _change(family: str, name: str, base: str, program: Program) -> Pair:
    return Pair(family, name, BASES[base], program, by_key=True, filled=base)


# -- arguments of operators


def _calling(name: str, changed: dict[str, Any]) -> Program:
    function, shapes, arguments = OPERATORS[name]
    values = {key: values[0] for key, values in arguments.items()} | changed
    return once(
        functools.partial(function, **values), lambda: tuple(torch.rand(*each) for each in shapes)
    )


def _arguments() -> Iterator[Pair]:
    for name, (_, _, arguments) in OPERATORS.items():
        base = _calling(name, {})
        for key, values in arguments.items():
            for value in values[1:]:
                program, what = _calling(name, {key: value}), f"{key}={value!r}"
                yield Pair("argument", what, base, program, by_key=True, filled=f"op {name}")


# -- inputs


def _leaf_like(old: Tensor, new: Tensor) -> Tensor:
    return new.detach().requires_grad_(old.requires_grad)


def _like(old: Tensor, *shape: int) -> Tensor:
    return _leaf_like(old, torch.randn(shape))


def _offset(value: Tensor, by: int) -> Tensor:
    room = torch.zeros(value.numel() + by, dtype=value.dtype)
    moved = room[by:].view(value.shape)
    moved.copy_(value.detach())
    return _leaf_like(value, moved)


_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    f"{rows}x{columns}": functools.partial(lambda r, c, x: _like(x, r, c), rows, columns)
    for rows in (2, 3, 6, 8)
    for columns in (4, 8, 12, 16, 32)
}
_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        str(dtype)[6:]: (lambda d: lambda x: _leaf_like(x, x.detach().to(d)))(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
    },
    **{f"offset {by}": (lambda n: lambda x: _offset(x, n))(by) for by in (1, 2, 3, 4, 8, 16, 63)},
    "transposed": lambda x: _leaf_like(x, x.detach().t().contiguous().t()),
    "every other column": lambda x: _leaf_like(x, torch.randn(4, 16)[:, ::2]),
    "every other row": lambda x: _leaf_like(x, torch.randn(8, 8)[::2]),
    "expanded": lambda x: _leaf_like(x, torch.randn(1, 8).expand(4, 8)),
    "on meta": lambda x: x.detach().to("meta"),
    "other grad": lambda x: x.detach().requires_grad_(not x.requires_grad),
    "no leaf": lambda x: x * 1,
    "no leaf that wants a grad": lambda x: x.detach().requires_grad_() * 1,
    "parameter": lambda x: torch.nn.Parameter(x.detach()),
    "buffer": lambda x: torch.nn.Buffer(x.detach()),
    "negated": lambda x: torch._neg_view(x.detach()),
    "other values": lambda x: _leaf_like(x, x.detach() * 3 + 1),
    "view of a base": lambda x: torch.randn(3, *x.shape)[1],
    "inference tensor": lambda x: _inference(x),
}


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.detach().clone()


def _pair(kind: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "one tensor":
        return x, x
    if kind == "one value":
        return x, x.detach()
    flat = torch.randn(2 * x.numel())
    size, start = x.numel(), {"apart": x.numel(), "half": x.numel() // 2, "next": 1}[kind]
    first = flat[:size].view(x.shape)
    second = flat[start : start + size].view(y.shape)
    return (first.requires_grad_() if x.requires_grad and kind == "apart" else first), second


_SHARED = ("one tensor", "one value", "apart", "half", "next")


def _inputs() -> Iterator[Pair]:
    for base, program in BASES.items():
        for name, change in _SHAPES.items():
            if base != "mlp" or name.endswith("x8"):  # other shapes do not fit its weights
                changed = _with_args(program, functools.partial(_changed, change, {0, 1}))
                yield _change("input", name, base, changed)
        for position in range(1 if base == "mlp" else 2):
            for name, change in _INPUTS.items():
                changed = _with_args(program, functools.partial(_changed, change, {position}))
                yield _change("input", f"{name} for input {position}", base, changed)
        if base != "mlp":
            for kind in _SHARED:
                changed = _with_args(program, functools.partial(_pair, kind))
                yield _change("sharing", kind, base, changed)
        for low, high in ((2, 8), (2, 100), (3, 50)):
            changed = _with_args(program, functools.partial(_marked, low, high))
            yield _change("dynamic", f"between {low} and {high}", base, changed)
        for options in ({"dynamic": True}, {"dynamic": False}, {"fullgraph": True}):
            if options != program.options:
                yield _change("dynamic", str(options), base, replace(program, options=options))


def _with_args(program: Program, change: Callable[..., tuple[Any, ...]]) -> Program:
    (call,) = program.calls
    return replace(program, calls=(replace(call, make=lambda: change(*call.make())),))


def _changed(
    change: Callable[[Tensor], Tensor], positions: set[int], *args: Tensor
) -> tuple[Tensor, ...]:
    return tuple(change(each) if at in positions else each for at, each in enumerate(args))


def _marked(low: int, high: int, *args: Tensor) -> tuple[Tensor, ...]:
    torch._dynamo.maybe_mark_dynamic(args[0], 0)
    for each in args:
        torch._dynamo.mark_dynamic(each, 0, min=low, max=high)
    return args


# -- settings


def _setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Context:
    return functools.partial(switched, read, write, value)


def _attribute(owner: Any, name: str, value: Any) -> Context:
    return functools.partial(attribute, owner, name, value)


def _sdp(name: str) -> Context:
    return _setting(
        getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
        getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        False,
    )


def surroundings() -> dict[str, Context]:
    mkldnn: Any = torch.backends.mkldnn
    autograd: Any = torch.autograd
    cudnn = torch.backends.cudnn
    return {
        "no grad": torch.no_grad,
        "inference mode": torch.inference_mode,
        **{
            f"autocast {str(dtype)[6:]}": functools.partial(torch.autocast, "cpu", dtype=dtype)
            for dtype in (torch.bfloat16, torch.float16)
        },
        "autocast without its cache": functools.partial(torch.autocast, "cpu", cache_enabled=False),
        "deterministic": deterministic,
        "deterministic, warning only": _setting(
            torch.are_deterministic_algorithms_enabled,
            lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
            True,
        ),
        "no filling": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "default float64": _setting(torch.get_default_dtype, torch.set_default_dtype, torch.double),
        "default bfloat16": _setting(
            torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16
        ),
        "default device meta": functools.partial(torch.device, "meta"),
        **{f"{count} threads": functools.partial(threads, count) for count in (1, 3, 4)},
        **{
            f"precision {how}": _setting(_precision, _set_precision, (how, None, None))
            for how in ("high", "medium")
        },
        **{f"no {name} attention": _sdp(name) for name in ("flash", "mem_efficient", "math")},
        "only math attention": functools.partial(sdpa_kernel, SDPBackend.MATH),
        "no mkldnn": functools.partial(mkldnn.flags, enabled=False),
        "mkldnn deterministic": functools.partial(mkldnn.flags, deterministic=True),
        "mkldnn bfloat16": _attribute(mkldnn.matmul, "fp32_precision", "bf16"),
        "mkldnn tf32": _attribute(mkldnn.conv, "fp32_precision", "tf32"),
        "cudnn benchmark": _attribute(cudnn, "benchmark", True),
        "cudnn deterministic": _attribute(cudnn, "deterministic", True),
        "reduced fp16": _attribute(
            torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
        ),
        "no fast path": _setting(
            torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
        ),
        "anomaly": functools.partial(torch.autograd.set_detect_anomaly, True),
        "one-threaded backward": functools.partial(
            torch.autograd.set_multithreading_enabled, False
        ),
        "view replay": functools.partial(autograd._force_original_view_tracking, True),
        "other tag": _attribute(torch.compiler.config, "cache_key_tag", "other"),
        "other torch": _attribute(codecache, "torch_key", lambda: b"other"),
        "other schema": _installed("s3cache.schema"),
        "other Python": _installed("python.abi"),
        "other instructions": _installed("machine.isa"),
        "other build": _installed("torch.build"),
    }


def _precision() -> tuple[str, Any, Any]:
    mkldnn: Any = torch.backends.mkldnn
    libraries = torch.backends.cuda.matmul, mkldnn.matmul
    return torch.get_float32_matmul_precision(), *(each.fp32_precision for each in libraries)


def _set_precision(wanted: tuple[str, Any, Any]) -> None:
    """torch's setter also sets the precision of libraries, and never back to ``none``."""
    torch.set_float32_matmul_precision(wanted[0])
    if wanted[1] is not None:
        torch.backends.cuda.matmul.fp32_precision = wanted[1]
        mkldnn: Any = torch.backends.mkldnn
        mkldnn.matmul.fp32_precision = wanted[2]


def _installed(name: str) -> Context:
    """Return a context in which this component of the installation has another value."""
    from s3cache.graph import _key

    real = _key.COMPONENTS
    assert any(row[0] == name for row in real)
    other = tuple((*row[:2], lambda _: "other") if row[0] == name else row for row in real)
    return _attribute(_key, "COMPONENTS", other)


def _settings() -> Iterator[Pair]:
    for name, context in surroundings().items():
        for base, program in BASES.items():
            if "device meta" in name and base == "mlp":
                continue
            yield _change("setting", name, base, replace(program, context=context))


# -- torch's configs


def _configs() -> Iterator[Pair]:
    for module in (inductor, functorch):
        for option, entry in module._config.items():
            if (
                entry.alias is not None
                or getattr(entry, "deprecated", None)
                or option in (*_NO_OPTIONS, *_LASTING)
            ):
                continue
            current = getattr(module, option)
            for value in _others(current, entry.value_type):
                context = functools.partial(module.patch, {option: value})
                name = f"{module.__name__.split('.')[1]}.{option}={value!r}"
                yield _change(
                    "config", name, "pointwise", replace(BASES["pointwise"], context=context)
                )


# Internal data of the config modules.
_NO_OPTIONS = ("_save_config_ignore", "_cache_config_ignore_prefix", "_cache_config_factory_keys")

# For this option, torch removes a decomposition for good, which changes all later programs.
_LASTING = ("fallback_embedding_bag_byte_unpack",)


def _others(value: Any, kind: Any) -> list[Any]:
    """Return plausible other values of an option."""
    allowed = [each for each in _literals(kind) if each != value]
    if allowed:
        return allowed[:2]
    if value is None:
        return _instead_of_nothing(kind)
    others: dict[type, Callable[[Any], list[Any]]] = {
        bool: lambda old: [not old],
        int: lambda old: [old + 1, old * 2 + 3],
        float: lambda old: [old + 0.5, old * 2 + 1.5],
        str: lambda old: [f"{old}other"],
        list: lambda old: [[*old, "other"]],
        tuple: lambda old: [(*old, "other")],
        dict: lambda old: [{**old, "other": 1}],
        set: lambda old: [{*old, "other"}],
    }
    return others.get(type(value), lambda _: [])(value)


def _literals(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    return [value for part in typing.get_args(kind) for value in _literals(part)]


def _instead_of_nothing(kind: Any) -> list[Any]:
    values: dict[Any, list[Any]] = {bool: [True, False], int: [3, 7], float: [0.5], str: ["other"]}
    return [each for part in typing.get_args(kind) for each in values.get(part, [])]


# -- constants


def _constants() -> Iterator[Pair]:
    places: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "closure": lambda value: lambda x, y: pointwise(x, y) * value,
        "global": lambda value: _written("base(x, y) * VALUE", VALUE=value),
        "literal": lambda value: _written(f"base(x, y) + {value!r}"),
        "tensor": lambda value: lambda x, y: pointwise(x, y) * torch.tensor([value] * 8),
    }
    for value in (0.0, 1.0, 2.0, -1.5, 1e-6, 1e10, float("inf"), 3, 0, -2, 2**31, True):
        scaled = mlp(functools.partial(_scaled, value))
        yield _change("constant", f"attribute {value!r}", "mlp", scaled)
        for where, make in places.items():
            name = f"{where} {value!r}"
            yield _change("constant", name, "pointwise", _replaced(make(value)))
    bodies = {
        "cos": lambda x, y: torch.cos(x) * y + x,
        "minus": lambda x, y: torch.sin(x) * y - x,
        "order": lambda x, y: x + torch.sin(x) * y,
        "more": lambda x, y: torch.sin(x) * y + x + x,
        "less": lambda x, y: torch.sin(x) * y,
        "swapped": lambda x, y: torch.sin(y) * x + y,
        "two outputs": lambda x, y: (torch.sin(x) * y + x, y),
        "in place": lambda x, y: torch.sin(x).mul_(y).add_(x),
        "detached": lambda x, y: torch.sin(x.detach()) * y + x,
        "no grad inside": _no_grad_inside,
        "alias of the input": lambda x, y: (pointwise(x, y), x.view(-1)),
        "is the input": lambda x, y: (pointwise(x, y), x),
        "rounded": lambda x, y: pointwise(x, y).to(torch.bfloat16).float(),
        "another size": lambda x, y: pointwise(x, y)[:2],
        "the same": lambda x, y: torch.sin(x) * y + x,
    }
    for name, body in bodies.items():
        yield _change("body", name, "pointwise", _replaced(body))


def _replaced(function: Callable[..., Any]) -> Program:
    return replace(BASES["pointwise"], function=function)


def _scaled(value: float) -> Mlp:
    model = Mlp()
    model.scale = value
    return model


def _written(body: str, **names: Any) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"inf": float("inf"), "base": pointwise, **names}
    exec(f"def program(x, y): return {body}", namespace)
    program: Callable[..., Any] = namespace["program"]
    return program


def _no_grad_inside(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        first = torch.sin(x)
    return first * y + x
