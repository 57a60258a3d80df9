"""Which sizes of a program turned out to change, as a frame.

A frame of kind ``shapes`` has one section, ``profile``: msgpack, a map from the fingerprint of a
piece of code to a map from the name of a tensor (``L['x']``) to what changes of it: ``[sizes,
strides, begun]``. The first two have a truth value for each dimension, or are nil. ``begun`` is a
list of digests, of what programs saw of the tensor when they saw it first.

It names no values: not the sizes that were seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame

__all__ = ["Changing", "ShapeProfile"]

_KIND = "shapes"
_SCHEMA = 2
_SECTION = "profile"
_MAX_BYTES = 4 << 20
_MAX_BEGUN = 16

Flags: TypeAlias = "tuple[bool, ...] | None"


@dataclass(frozen=True)
class Changing:
    """What changes of one tensor from call to call.

    Attributes:
        sizes, strides: in which dimensions; ``None`` where nothing is known.
        begun: digests of what programs saw of it first, when they knew of no change. There are
            graphs of constants for these; at most 16 are kept.
    """

    sizes: Flags = None
    strides: Flags = None
    begun: tuple[str, ...] = ()

    def merged(self, other: Changing) -> Changing:
        """Return what changes by either; of two numbers of dimensions the larger one counts."""
        return Changing(
            _merged(self.sizes, other.sizes),
            _merged(self.strides, other.strides),
            tuple(sorted({*self.begun, *other.begun})[:_MAX_BEGUN]),
        )


def _merged(ours: Flags, theirs: Flags) -> Flags:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if len(ours) != len(theirs):
        return max(ours, theirs, key=len)
    return tuple(our or their for our, their in zip(ours, theirs, strict=True))


@dataclass
class ShapeProfile:
    """What changes, by the fingerprint of the code and the name of the input."""

    inputs: dict[str, dict[str, Changing]] = field(default_factory=dict)

    def get(self, code: str, name: str) -> Changing | None:
        """Return what is known of an input."""
        return self.inputs.get(code, {}).get(name)

    def add(self, code: str, name: str, changing: Changing) -> bool:
        """Add what is known of an input; return whether that was news."""
        known = self.get(code, name)
        merged = changing if known is None else known.merged(changing)
        self.inputs.setdefault(code, {})[name] = merged
        return merged != known

    def update(self, other: ShapeProfile) -> None:
        """Add all that ``other`` knows."""
        for code, inputs in other.inputs.items():
            for name, changing in inputs.items():
                self.add(code, name, changing)

    def encode(self, key: str) -> bytes:
        """Return a frame under ``key``; profiles that say the same are one variant."""
        plain = {
            code: {name: [*vars(changing).values()] for name, changing in sorted(inputs.items())}
            for code, inputs in sorted(self.inputs.items())
        }
        content: bytes = msgpack.packb(plain)
        return frame.encode(
            kind=_KIND,
            key=key,
            variant=hashlib.sha256(content).hexdigest()[:32],
            schema=_SCHEMA,
            sections={_SECTION: content},
        )

    @classmethod
    def of(cls, entry: Frame) -> ShapeProfile:
        """Return the profile in a verified frame.

        Raises:
            CorruptError: it is of another kind or schema, or holds something else.
        """
        header = entry.header
        if (header.kind, header.schema) != (_KIND, _SCHEMA) or _SECTION not in entry.names:
            raise CorruptError("frame", f"is no shape profile: {header.kind} {header.schema}")
        content = entry.section(_SECTION)
        if len(content) > _MAX_BYTES:
            raise CorruptError("profile", f"has {len(content)} bytes")
        try:
            plain = msgpack.unpackb(content, raw=False, max_ext_len=0, max_array_len=1 << 10)
            return cls(
                {
                    _text(code): {_text(name): _changing(*parts) for name, parts in inputs.items()}
                    for code, inputs in plain.items()
                }
            )
        except (AttributeError, TypeError, ValueError, msgpack.UnpackException) as exc:
            raise CorruptError("profile", f"is none ({exc!r})") from None


def _changing(sizes: object, strides: object, begun: Iterable[object]) -> Changing:
    return Changing(_flags(sizes), _flags(strides), tuple(map(_text, begun)))


def _flags(plain: object) -> Flags:
    if plain is None:
        return None
    if not isinstance(plain, list) or any(type(flag) is not bool for flag in plain):
        raise ValueError("dimensions are no truth values")
    return tuple(plain)


def _text(plain: object) -> str:
    if type(plain) is not str:
        raise ValueError("a name is no text")
    return plain
