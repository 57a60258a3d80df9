"""The key of a graph: a digest over named components, each with a digest of its own.

torch collects all that its compiled code depends on in one details object; every attribute of it
is a component, so what a newer torch adds is covered. The other modules here add what torch leaves
out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Component", "Key"]

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
        return cls.of_bytes(text.encode(), text)

    @classmethod
    def of_bytes(cls, data: bytes, value: str) -> Component:
        """A component with content that nobody wants to read."""
        if len(value) > _VALUE_CHARACTERS:
            value = value[:_VALUE_CHARACTERS] + "…"
        return cls(hashlib.sha256(data).hexdigest()[:32], value)


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
