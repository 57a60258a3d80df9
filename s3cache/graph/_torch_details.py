"""Components of what torch's own key is made of: one for each attribute of its details object.

So what a newer torch adds to its details is in the key, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, cast

from s3cache.graph._graph_bytes import CanonicalPickler
from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._results import (
    BypassReason,
    Component,
    Finding,
    RegisteredVersion,
    bounded,
    suggested_fix,
)
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Config, KeyDetails

_LEFT_OUT = frozenset(name for fields in internals.CACHING_OPTIONS for name in fields.names)
_SCALARS = (type(None), bool, int, float, complex, str)
_ALL_CHARACTERS = 128 << 10
# Numbers that count graphs of a process are in no key.
_OF_THE_PROCESS = frozenset({"aot_id", "precompile_backend_id"})


def torch_components(
    details: KeyDetails, canonical: CanonicalPickler
) -> Iterator[tuple[str, Finding]]:
    """Yield the name of each attribute of ``details``, and its component or reasons against it."""
    for name, value in vars(details).items():
        if name in internals.CACHING_DETAILS.names:  # entries here are bundled in any case
            continue
        try:
            if name in internals.CONFIG_DETAILS.names:
                yield name, _config_component(name, value, canonical)
                continue
            if name == "aot_config":
                value = internals.without_backend_id(value)
            elif name == internals.PASSES_OF_BACKENDS:
                value = internals.passes_by_device(cast("Sequence[object]", value))
            elif name in internals.PROVENANCE_DETAILS.names:
                value = internals.without_debugging(value)
            data = canonical(value)
            yield name, Component.of_bytes(data, _value_text(value), _parts_of(value, canonical))
        except Exception as exc:  # noqa: BLE001 - pickling runs anybody's code
            yield name, _reasons(name, exc)


def _reasons(name: str, error: BaseException) -> list[BypassReason]:
    while error.__cause__ is not None:
        error = error.__cause__
    if name in internals.CONFIG_DETAILS.names:
        if options := list(unpicklable_options()):
            return options
        if isinstance(error, UnidentifiedError):
            fix = suggested_fix(error.about)
            return [BypassReason("config", f"an option of {name} {error}", fix, target=name)]
    fix = "give what it holds a __reduce__ that does not depend on the process"
    return [BypassReason("component", f"{name} has no stable bytes: {error}", fix, target=name)]


# -- options

# The last one of each kind: most graphs of a process are compiled under one configuration.
_last: dict[str, tuple[object, Component]] = {}


def _config_component(
    name: str, value: bytes | Mapping[str, object], canonical: CanonicalPickler
) -> Component:
    values = pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - torch's own
    plain, others = [], []
    for option in sorted(values):
        setting = values[option]
        if option in _LEFT_OUT:
            continue
        if type(setting) in _SCALARS:
            plain.append((option, type(setting), setting))
        else:
            others.append((option, _ordered(setting, canonical.registered_version)))
    data = canonical(others)
    known = _last.get(name)
    if known is None or known[0] != (plain, data):
        content = repr([(option, setting) for option, _, setting in plain]).encode() + data
        changed = _changed(name, values, canonical)
        shown = " ".join(f"{option}={text}" for option, (text, _) in changed.items()) or "defaults"
        parts = bounded((option, default + text) for option, (text, default) in changed.items())
        known = (plain, data), Component.of_bytes(content, shown, parts)
        _last[name] = known
    return known[1]


def _ordered(value: object, registered_version: RegisteredVersion) -> object:
    """Return ``value`` with sets in one order for all processes, and identities of functions."""
    if isinstance(value, dict):
        return [
            (name, _ordered(value[name], registered_version)) for name in sorted(value, key=str)
        ]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_ordered(item, registered_version) for item in value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, FunctionType):
        return value, identity(value, registered_version)
    return value


def _changed(
    name: str, values: Mapping[str, object], canonical: CanonicalPickler
) -> dict[str, tuple[str, str]]:
    """Return the options that are not as torch has them by default, and ``DEFAULT → `` of each."""
    configs: dict[str, Config] = {
        "autograd_config": internals.functorch_config.get(),
        "inductor_config": internals.inductor_config.get(),
    }
    known = configs[name]._config if name in configs else None
    changed = {}
    for option, setting in sorted(values.items()):
        if option in _LEFT_OUT or (known is not None and option not in known):
            continue
        default = ""
        if known is not None:
            if known[option].default == setting:
                continue
            default = f"{_option_text(option, known[option].default, canonical)} → "
        changed[option] = _option_text(option, setting, canonical), default
    return changed


def _option_text(option: str, setting: object, canonical: CanonicalPickler) -> str:
    """Return the setting as text; where that is not all of it, with digits of its digest."""
    ordered = _ordered(setting, canonical.registered_version)
    if _is_plain(ordered):
        return repr(setting)
    digest = hashlib.sha256(canonical((option, ordered))).hexdigest()[:8]
    return f"{_item_text(setting)} #{digest}"


def _is_plain(value: object) -> bool:
    """Return whether ``repr`` says all of it, and nothing of the process that it is in."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _SCALARS


def unpicklable_options() -> Iterator[BypassReason]:
    """Yield a reason for each option of torch that cannot be in a key."""
    configs: list[Config] = [internals.functorch_config.get(), internals.inductor_config.get()]
    for config in configs:
        ignored = (
            *getattr(config, "_save_config_ignore", ()),  # not every module has both of them
            *getattr(config, "_cache_config_ignore_prefix", ()),
        )
        for option, entry in config._config.items():
            if option.startswith(ignored) or entry.alias is not None:
                continue
            try:
                pickle.dumps(internals.read_quietly(config, option))
            except Exception as exc:  # noqa: BLE001 - whatever pickling meets
                name = f"{config.__name__}.{option}"
                fix = "set it to a function or class at the top of a module"
                message = f"{name} cannot be pickled: {exc}"
                yield BypassReason("config", message, fix, target=name)


# -- texts for people
#
# They are in no digest: two components may differ where these are equal.


def _value_text(value: object) -> str:
    import torch

    if isinstance(value, (str, torch.dtype)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()[:32]
    if isinstance(value, torch.fx.GraphModule):
        return f"graph of {len(value.graph.nodes)} nodes"
    if isinstance(value, (list, tuple)):
        texts = " ".join(_item_text(item) for item in value[:20])
        return f"{len(value)}: {texts}" if value else "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={_item_text(item)}" for name, item in value.items()) or "none"
    return _item_text(value)


def _item_text(value: object) -> str:
    """Return a value in a few characters; none that differ by process, as addresses do."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (*_SCALARS, torch.dtype, torch.device, torch.SymInt)):
        return str(value)
    return type(value).__qualname__


def _parts_of(value: object, canonical: CanonicalPickler) -> Mapping[str, str]:
    """Return what a value whose bytes were just made consists of, so that a difference has a name.

    Of a graph that is its code, of a list each item by number, of options and objects each by name.
    """
    if canonical.codes:
        return bounded((("code", "\n".join(canonical.codes)),), _ALL_CHARACTERS)
    parts: Iterator[tuple[object, object]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, (list, tuple)):
        parts = iter(enumerate(value))
    elif dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        fields = ((name, getattr(value, name, None)) for name in names)
        parts = (
            (n, field) for n, field in fields if n not in _OF_THE_PROCESS and not callable(field)
        )
    return bounded((str(name), _part_text(part, canonical)) for name, part in parts)


def _part_text(value: object, canonical: CanonicalPickler, depth: int = 0) -> str:
    import torch

    if type(value) in _SCALARS:
        return repr(value)
    if id(value) in canonical.tensor_texts:
        return canonical.tensor_texts[id(value)]
    if isinstance(value, internals.source.get()):
        return internals.name_of_source(value) or ""
    if isinstance(value, (list, tuple)) and depth < 3:
        items = (_part_text(item, canonical, depth + 1) for item in value[:1024])
        return f"[{', '.join(items)}]"
    if isinstance(value, (torch.dtype, torch.device, torch.Size, torch.SymInt, torch.layout)):
        return str(value)
    held = getattr(value, "value", None)  # a box of torch's
    if type(held) in (bool, int):
        return repr(held)
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else type(value).__qualname__
