"""The key of a graph: a digest over named components, each with a digest of its own.

torch collects all that its compiled code depends on in one details object; every attribute of it is
a component, so what a newer torch adds is covered. :mod:`s3cache.graph._machine` adds what torch
leaves out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Component", "Key", "components_of"]

_VALUE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a key.

    Attributes:
        digest: 32 hexadecimal digits.
        value: what it is, for people; shortened, and not part of the key.
    """

    digest: str
    value: str

    @classmethod
    def of_text(cls, text: str) -> Component:
        """A component whose value is its whole content."""
        return cls(_digest(text.encode()), _short(text))


@dataclass(frozen=True, slots=True)
class Key:
    """A cache key that can say what it is made of."""

    components: Mapping[str, Component]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits; equal keys have equal components, whatever their order."""
        whole = hashlib.sha256()
        for name in sorted(self.components):
            whole.update(f"{name}\0{self.components[name].digest}\n".encode())
        return whole.hexdigest()


def components_of(details: object, pickled: Callable[[Any], bytes]) -> dict[str, Component]:
    """One component for each attribute of torch's details.

    Args:
        details: torch's ``AOTAutogradCacheDetails`` (or a later torch's like of it).
        pickled: stable bytes of an attribute's value; raises what torch's pickler raises for a
            value that has none.
    """
    return {
        name: Component(_digest(pickled(value)), _readable(value))
        for name, value in vars(details).items()
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _readable(value: object) -> str:
    if isinstance(value, (type(None), bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, bytes):
        return value.hex()[:32]
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__qualname__


def _short(text: str) -> str:
    if len(text) <= _VALUE_CHARACTERS:
        return text
    return text[:_VALUE_CHARACTERS] + "…"
