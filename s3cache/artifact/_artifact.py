"""What entries hold, as frames: compiled graphs, and which sizes of a program change.

Sections of a frame of kind ``aot``, a whole graph, or ``fx``, a forward or backward by Inductor::

    entry            of ``aot``: torch's own AOTAutograd result (pickle): compiled forward and
                     backward with their source, runtime metadata, wrappers, backward module,
                     Triton bundles; of ``fx``: torch's own compiled FX graph (pickle)
    kernel/<id>      shared library of one native kernel that the compiled code loads
    parts            JSON, to explain why another key is not this one: what components of the key
                     consist of, where the readable value does not say it

and its ``meta``: ``guards`` (text, or nil), ``times_ns`` (forward, backward), ``runtime`` (what the
graph does to inputs and outputs, packed: :func:`s3cache.artifact.description` reads it; nil for
``fx``, and where it is too large), ``components`` (name to [digest, readable value] of the key),
``made_by`` (torch, compiler and platform, for people). Two more are there if they apply:
``first_call`` (the outputs of a first call on fake tensors, see ``hooks/_distributed.py``) and
``relies_on`` (where inputs have to lie in their storages, as text, see ``hooks/_conditions.py``).

A frame of kind ``shapes`` has one section, ``profile``: msgpack, a map from the fingerprint of a
piece of code to a map from the name of a tensor (``L['x']``) to what changes of it: ``[sizes,
strides, begun]``, see :class:`Changing`. It names no values: not the sizes that were seen.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import Level
from s3cache.store import Buffer

__all__ = [
    "CONDITIONS",
    "SCHEMA",
    "Artifact",
    "Changing",
    "ShapeProfile",
    "check_image",
    "hidden_places",
    "variant_of",
    "without_places",
]

SCHEMA = 2
#: The attribute of torch's result that says what its code relies on beside its key.
CONDITIONS = "s3cache_conditions"
_ENTRY = "entry"
_KERNEL = "kernel/"
_PARTS = "parts"
_SHAPES = "shapes"
_PROFILE = "profile"
_MAX_PROFILE_BYTES = 4 << 20
_MAX_BEGUN = 16

Flags: TypeAlias = "tuple[bool, ...] | None"


@dataclass(frozen=True)
class Artifact:
    """What there is to save of a compiled graph, see the module.

    ``forward_ns`` and ``backward_ns`` are what compiling took; ``kernels`` are images by id, and
    ``parts`` what components consist of, by their names.
    """

    kind: Level
    entry: Buffer
    kernels: Mapping[str, Buffer]
    guards: str | None = None
    forward_ns: int = 0
    backward_ns: int = 0
    runtime: bytes | None = None
    components: Mapping[str, object] = field(default_factory=dict)
    made_by: Mapping[str, object] = field(default_factory=dict)
    first_call: Sequence[Mapping[str, object]] | None = None
    relies_on: str | None = None
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def encode(self, key: str) -> bytes:
        """Return this artifact as a frame under ``key``."""
        sections = {_ENTRY: self.entry}
        sections |= {_KERNEL + name: image for name, image in self.kernels.items()}
        if self.parts:
            parts = {name: dict(texts) for name, texts in self.parts.items()}
            sections[_PARTS] = json.dumps(parts, separators=(",", ":")).encode()
        meta: dict[str, object] = {
            "guards": self.guards,
            "times_ns": [self.forward_ns, self.backward_ns],
            "runtime": self.runtime,
            "components": dict(self.components),
            "made_by": dict(self.made_by),
        }
        if self.first_call is not None:
            meta["first_call"] = list(self.first_call)
        if self.relies_on is not None:
            meta["relies_on"] = self.relies_on
        variant = variant_of(self.guards, self.relies_on)
        return frame.encode(
            kind=self.kind, key=key, variant=variant, schema=SCHEMA, sections=sections, meta=meta
        )

    @staticmethod
    def entry_of(entry: Frame, kind: Level) -> Buffer:
        """Return the pickled result in a verified frame of that kind.

        Raises:
            CorruptError: the frame is of another kind or schema, or lacks the section.
        """
        return _section(entry, kind, _ENTRY)

    @staticmethod
    def kernels_of(entry: Frame) -> dict[str, Buffer]:
        """Return images of the kernels in a verified frame, by id."""
        names = (name for name in entry.names if name.startswith(_KERNEL))
        return {name[len(_KERNEL) :]: entry.section(name) for name in names}

    @staticmethod
    def parts_of(entry: Frame) -> dict[str, dict[str, str]]:
        """Return what components of its key consist of, if a verified frame says so."""
        if _PARTS not in entry.names:
            return {}
        try:
            parts: object = json.loads(bytes(entry.section(_PARTS)))
        except (RecursionError, ValueError):
            return {}
        return {
            str(name): {str(part): str(text) for part, text in texts.items()}
            for name, texts in (parts.items() if isinstance(parts, dict) else ())
            if isinstance(texts, dict)
        }

    @staticmethod
    def first_call_of(entry: Frame) -> Sequence[Mapping[str, object]] | None:
        """Return the described outputs in a verified frame, if its first call is on fake tensors.

        Raises:
            CorruptError: they are no sequence of descriptions.
        """
        described = entry.header.meta.get("first_call")
        if described is None:
            return None
        if not isinstance(described, (list, tuple)) or not all(
            isinstance(output, Mapping) for output in described
        ):
            raise CorruptError("first_call", "describes no outputs")
        return described


def _section(entry: Frame, kind: str, name: str) -> Buffer:
    header = entry.header
    if (header.kind, header.schema) != (kind, SCHEMA) or name not in entry.names:
        found = f"{header.kind} {header.schema}"
        raise CorruptError("frame", f"holds no {name} of kind {kind} and schema {SCHEMA}: {found}")
    return entry.section(name)


def variant_of(guards: str | None, relies_on: str | None = None) -> str:
    """Return what tells entries under one key apart: those with one are interchangeable."""
    conditions = (guards or "") + ("" if relies_on is None else f"\0{relies_on}")
    return hashlib.sha256(conditions.encode()).hexdigest()[:32] if conditions else ""


# -- which sizes change


@dataclass(frozen=True)
class Changing:
    """What changes of one tensor from call to call.

    Attributes:
        sizes, strides: in which dimensions; ``None`` where nothing is known.
        begun: digests of the sizes that programs saw first, before anything had changed. For
            these there are graphs with constant sizes; at most 16 are kept.
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

    @staticmethod
    def of(plain: object) -> Changing:
        """Return it as :meth:`ShapeProfile.encode` wrote it, or raise ``ValueError``."""
        match plain:
            case [None | list() as sizes, None | list() as strides, list(begun)]:
                flags = [*(sizes or ()), *(strides or ())]
                if {*map(type, flags)} <= {bool} and {*map(type, begun)} <= {str}:
                    known = [None if each is None else tuple(each) for each in (sizes, strides)]
                    return Changing(known[0], known[1], tuple(begun))
        raise ValueError(f"{str(plain)[:80]} is not what changes of a tensor")


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
        variant = hashlib.sha256(content).hexdigest()[:32]
        sections = {_PROFILE: content}
        return frame.encode(
            kind=_SHAPES, key=key, variant=variant, schema=SCHEMA, sections=sections
        )

    @staticmethod
    def of(entry: Frame) -> ShapeProfile:
        """Return the profile in a verified frame.

        Raises:
            CorruptError: it is of another kind or schema, or holds something else.
        """
        content = _section(entry, _SHAPES, _PROFILE)
        if len(content) > _MAX_PROFILE_BYTES:
            raise CorruptError("profile", f"has {len(content)} bytes")
        try:
            plain = msgpack.unpackb(content, max_ext_len=0, max_array_len=1 << 10)
            return ShapeProfile(
                {
                    code: {name: Changing.of(each) for name, each in inputs.items()}
                    for code, inputs in plain.items()
                }
            )
        except (AttributeError, TypeError, ValueError, msgpack.UnpackException) as exc:
            raise CorruptError("profile", f"is none ({exc!r})") from None


# -- images

_ELF_64 = b"\x7fELF\x02"
_LOADED = 1  # PT_LOAD
_NO_SECTION = 0  # SHT_NULL
_IN_MEMORY = 2  # SHF_ALLOC
_DEBUG = (b".debug", b".zdebug")


def check_image(image: Buffer) -> None:
    """Check that the dynamic loader maps nothing beyond the end of ``image``.

    It checks little by itself, and touching such a page ends the process (SIGBUS). Images of
    another format than 64-bit ELF are left to the loader.

    Raises:
        CorruptError: the image is cut short.
    """
    if bytes(image[:5]) != _ELF_64:
        return
    order = _order(image)
    try:
        for at in _headers(image, order, table=32, counts=54):
            kind, _, start, _, _, in_file = struct.unpack_from(f"{order}IIQQQQ", image, at)
            if kind == _LOADED and start + in_file > len(image):
                raise CorruptError("kernel", "is cut short")
    except struct.error:
        raise CorruptError("kernel", "is cut short") from None


def without_places(image: Buffer, *prefixes: str) -> Buffer:
    """Return ``image`` without what debuggers read, and with dots for paths below ``prefixes``.

    Both name directories of the machine that compiled it. Nothing moves: debugging sections become
    zeros, and a path keeps its length and its end, for linkers share the ends of strings. An image
    of another format than 64-bit ELF, or one that is not understood, keeps its debugging sections.
    """
    mended = bytearray(image)
    if bytes(image[:5]) == _ELF_64:
        try:
            for at, start, size in list(_debugging(image)):
                mended[start : start + size] = bytes(size)
                struct.pack_into(f"{_order(image)}I", mended, at + 4, _NO_SECTION)
        except (struct.error, IndexError, CorruptError):
            mended = bytearray(image)
    return hidden_places(mended, *prefixes)


def hidden_places(data: Buffer, *prefixes: str) -> bytes:
    """Return ``data`` with dots for paths that begin with ``prefixes``; nothing moves."""
    hidden = bytes(data)
    for prefix in filter(None, map(str.encode, prefixes)):
        hidden = hidden.replace(prefix + b"/", b"/".ljust(len(prefix), b".") + b"/")
    return hidden


def _debugging(image: Buffer) -> Iterator[tuple[int, int, int]]:
    """Yield where the header of each such section is, where the section begins, and its size."""
    order = _order(image)
    headers = list(_headers(image, order, table=40, counts=58))
    (of_names,) = struct.unpack_from(f"{order}H", image, 62)
    if not headers:
        return
    names_at, names_size = struct.unpack_from(f"{order}QQ", image, headers[of_names] + 24)
    names = bytes(image[names_at : names_at + names_size])
    for at in headers:
        name, _, flags, _, start, size = struct.unpack_from(f"{order}IIQQQQ", image, at)
        is_debugging = names[name:].startswith(_DEBUG) and not flags & _IN_MEMORY
        if is_debugging and start + size <= len(image):
            yield at, start, size


def _order(image: Buffer) -> str:
    return "<" if bytes(image[5:6]) == b"\x01" else ">"


def _headers(image: Buffer, order: str, *, table: int, counts: int) -> Iterator[int]:
    """Yield where each header begins of a table that ELF describes at ``table`` and ``counts``."""
    (offset,) = struct.unpack_from(f"{order}Q", image, table)
    size, count = struct.unpack_from(f"{order}HH", image, counts)
    if size < struct.calcsize(f"{order}IIQQQQ") or (not count and table == 32):
        raise CorruptError("kernel", "has no program headers")
    yield from range(offset, offset + size * count, size)
