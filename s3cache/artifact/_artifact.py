"""One compiled graph as a frame.

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
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import Level
from s3cache.store import Buffer

__all__ = [
    "CONDITIONS",
    "SCHEMA",
    "Artifact",
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


@dataclass(frozen=True)
class Artifact:
    """What there is to save of a compiled graph.

    Attributes:
        kind: the level of torch's caches that it is for.
        entry: torch's pickled result.
        kernels: images of shared libraries by kernel id.
        guards: expression over the graph's symbolic inputs that must hold for a hit.
        forward_ns, backward_ns: what compiling took.
        runtime: the packed description, if there is one.
        components, made_by: plain data, see the module.
        first_call: the outputs of a graph that has to answer its first call with fake ones.
        relies_on: what else must hold for a hit, if anything.
        parts: what components consist of, by their names.
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

    @property
    def variant(self) -> str:
        """See :func:`variant_of`."""
        return variant_of(self.guards, self.relies_on)

    def encode(self, key: str) -> bytes:
        """Return this artifact as a frame under ``key``."""
        parts = {name: dict(texts) for name, texts in self.parts.items()}
        return frame.encode(
            kind=self.kind,
            key=key,
            variant=self.variant,
            schema=SCHEMA,
            sections={
                _ENTRY: self.entry,
                **{_KERNEL + name: image for name, image in self.kernels.items()},
                **({_PARTS: json.dumps(parts, separators=(",", ":")).encode()} if parts else {}),
            },
            meta={
                "guards": self.guards,
                "times_ns": [self.forward_ns, self.backward_ns],
                "runtime": self.runtime,
                "components": dict(self.components),
                "made_by": dict(self.made_by),
                **({} if self.first_call is None else {"first_call": list(self.first_call)}),
                **({} if self.relies_on is None else {"relies_on": self.relies_on}),
            },
        )

    @staticmethod
    def entry_of(entry: Frame, kind: Level) -> Buffer:
        """Return the pickled result in a verified frame of that kind.

        Raises:
            CorruptError: the frame is of another kind or schema, or lacks the section.
        """
        header = entry.header
        if (header.kind, header.schema) != (kind, SCHEMA) or _ENTRY not in entry.names:
            raise CorruptError(
                "frame",
                f"is no compiled graph ({kind}) of schema {SCHEMA}: {header.kind} {header.schema}",
            )
        return entry.section(_ENTRY)

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


def variant_of(guards: str | None, relies_on: str | None = None) -> str:
    """Return what tells entries under one key apart: those with one are interchangeable."""
    conditions = (guards or "") + ("" if relies_on is None else f"\0{relies_on}")
    return hashlib.sha256(conditions.encode()).hexdigest()[:32] if conditions else ""


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

    Both name directories of the machine that compiled it. Nothing moves: what is left out becomes
    zeros, which take no room once compressed, in sections that say that they are none; a path keeps
    its length and its end, for linkers share the ends of strings. An image of another format than
    64-bit ELF, or one that is not understood, keeps its debugging sections.
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
