"""What the components of a key consist of, part by part: so that a difference can be named.

For people, and in no digest: two components may differ where these words are equal. Texts are
shortened, and few enough that an entry grows by little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.graph._stable import StableBytes

__all__ = ["bounded", "shown_parts"]

_COUNT = 1024
_CHARACTERS = 1 << 10
_ALL_CHARACTERS = 128 << 10
# What counts graphs of a process is in no key.
_OF_THE_PROCESS = frozenset({"aot_id", "precompile_backend_id"})
_SCALARS = (type(None), bool, int, float, complex, str)


def shown_parts(value: object, stable: StableBytes) -> Mapping[str, str]:
    """The parts of a value whose bytes ``stable`` has just made, by name.

    Of a graph that is its code, of a list each item by number, of options and objects each by name.
    """
    if stable.codes:
        return bounded((("code", "\n".join(stable.codes)),), _ALL_CHARACTERS)
    return bounded((name, _text(part, stable)) for name, part in _named(value))


def bounded(parts: Iterable[tuple[str, str]], characters: int = _CHARACTERS) -> dict[str, str]:
    """``parts``, the first of them, each shortened."""
    found: dict[str, str] = {}
    left = _ALL_CHARACTERS
    for name, text in parts:
        if len(found) == _COUNT or left <= 0:
            break
        found[name] = text if len(text) <= characters else text[:characters] + "…"
        left -= len(text)
    return found


def _named(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            part = getattr(value, each.name, None)
            if not callable(part) and each.name not in _OF_THE_PROCESS:
                yield each.name, part


def _text(value: object, stable: StableBytes, depth: int = 0) -> str:
    if type(value) in _SCALARS:
        return repr(value)
    told = stable.told.get(id(value))
    if told is not None:
        return told
    if isinstance(value, internals.source.get()):
        name = getattr(value, "name", "")
        return str(name() if callable(name) else name)
    if isinstance(value, (list, tuple)) and depth < 3:
        return f"[{', '.join(_text(each, stable, depth + 1) for each in value[:_COUNT])}]"
    return _plain(value)


def _plain(value: object) -> str:
    """Nothing that differs from process to process, as addresses do."""
    import torch

    if isinstance(value, (torch.dtype, torch.device, torch.Size, torch.SymInt, torch.layout)):
        return str(value)
    held = getattr(value, "value", None)  # a box of torch's
    if type(held) in (bool, int):
        return repr(held)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    return type(value).__qualname__
