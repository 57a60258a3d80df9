"""Components from torch's ``AOTAutogradCacheDetails``: one for each of its attributes."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from s3cache.graph._code import fingerprint
from s3cache.graph._key import Component
from s3cache.graph._pickled import Pickled
from s3cache.graph._safety import Unsafe

__all__ = ["details_components", "unpicklable_configs"]

# Attributes of the details that are options of torch's config modules.
_CONFIGS = ("autograd_config", "inductor_config", "inductor_config_comms")
# Options that say how to cache, or how to go about compiling, and nothing about what is compiled;
# and the path of the compiler, which a hit does not need and a reader may not have.
_LEFT_OUT = frozenset(
    {
        "cpp.cxx",
        "cpp_cache_precompile_headers",
        "bundled_autograd_cache",
        "enable_autograd_cache",
        "enable_remote_autograd_cache",
        "force_autograd_cache",
        "strict_autograd_cache",
    }
)
# An attribute that is one of them: entries here are bundled, whatever torch was told.
_NOT_CODE = frozenset({"precompile_enabled"})
_SCALARS = (type(None), bool, int, float, str)


def details_components(
    details: object, pickled: Pickled
) -> tuple[dict[str, Component], list[Unsafe]]:
    """A component for each attribute, and those attributes that have none."""
    components: dict[str, Component] = {}
    unsafe: list[Unsafe] = []
    for name, value in vars(details).items():
        if name in _NOT_CODE:
            continue
        try:
            if name in _CONFIGS:
                components[name] = _of_config(name, value, pickled)
            else:
                components[name] = Component.of_bytes(pickled(_stable(name, value)), _read(value))
        except Exception as exc:  # noqa: BLE001 - pickling runs anybody's code
            unsafe += _reasons(name, exc)
    return components, unsafe


def _reasons(name: str, error: Exception) -> list[Unsafe]:
    found = list(unpicklable_configs()) if name in _CONFIGS else []
    return found or [
        Unsafe(
            "component",
            f"{name} has no stable bytes: {_innermost(error)}",
            "give what it holds a __reduce__ that does not depend on the process",
            target=name,
        )
    ]


def _innermost(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _innermost(error.__cause__)


def _stable(name: str, value: Any) -> Any:
    if name == "aot_config" and getattr(value, "precompile_backend_id", None) is not None:
        # Random in each process, under torch._dynamo.config.caching_precompile.
        return dataclasses.replace(value, precompile_backend_id=None)
    return value


# -- configs

# The last one of each kind: most graphs of a process are compiled under one configuration.
_last: dict[str, tuple[Any, Component]] = {}


def _of_config(name: str, value: Any, pickled: Pickled) -> Component:
    values = pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - torch's own
    plain = []
    rest = []
    for option in sorted(values):
        setting = values[option]
        if option in _LEFT_OUT:
            continue
        if type(setting) in _SCALARS:
            plain.append((option, type(setting), setting))
        else:
            rest.append((option, _ordered(setting)))
    others = pickled(rest)
    known = _last.get(name)
    if known is None or known[0] != (plain, others):
        data = repr([(option, setting) for option, _, setting in plain]).encode() + others
        known = (plain, others), Component.of_bytes(data, _changed(name, values))
        _last[name] = known
    return known[1]


def _ordered(value: Any) -> Any:
    """Sets have an order that differs from process to process; functions have a body."""
    if isinstance(value, dict):
        return [(each, _ordered(value[each])) for each in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_ordered, value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, FunctionType):
        return value, fingerprint(value)
    return value


def _changed(name: str, values: Mapping[str, Any]) -> str:
    """The options that are not as torch has them by default."""
    import torch

    modules = {
        "autograd_config": torch._functorch.config,
        "inductor_config": torch._inductor.config,
    }
    if name not in modules:
        return f"{len(values)} options"
    entries = modules[name]._config
    changed = [
        f"{option}={setting!r}"
        for option, setting in sorted(values.items())
        if option not in _LEFT_OUT and option in entries and entries[option].default != setting
    ]
    return " ".join(changed) or "defaults"


def unpicklable_configs() -> Iterator[Unsafe]:
    """Options of torch that cannot be part of a key."""
    import torch

    for name, module in (
        ("torch._functorch.config", torch._functorch.config),
        ("torch._inductor.config", torch._inductor.config),
    ):
        ignored = (
            *getattr(module, "_save_config_ignore", ()),
            *getattr(module, "_cache_config_ignore_prefix", ()),
        )
        for option in module._config:
            if option.startswith(ignored) or module._config[option].alias is not None:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # options that torch is about to remove
                    setting = getattr(module, option)
                pickle.dumps(setting)
            except Exception as exc:  # noqa: BLE001 - whatever pickling meets
                yield Unsafe(
                    "config",
                    f"{name}.{option} cannot be pickled: {exc}",
                    "set it to a function or class at the top of a module",
                    target=f"{name}.{option}",
                )


# -- for people


def _read(value: Any) -> str:
    import torch

    if isinstance(value, (bool, int, float, type(None))):
        return repr(value)
    if isinstance(value, (str, torch.dtype)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()[:32]
    if isinstance(value, torch.fx.GraphModule):
        return f"graph of {len(value.graph.nodes)} nodes"
    if isinstance(value, (list, tuple)):
        shown = " ".join(_read_item(each) for each in value[:20])
        return f"{len(value)}: {shown}" if value else "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={_read_item(each)}" for name, each in value.items()) or "none"
    return type(value).__qualname__


def _read_item(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.SymInt)):
        return str(value)
    return type(value).__qualname__
