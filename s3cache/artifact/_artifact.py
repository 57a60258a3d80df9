"""Encode and decode the entry of a compiled graph.

Sections of a frame of kind ``aot`` (a whole graph) or ``fx`` (a forward or backward by Inductor)::

    entry            of ``aot``: torch's own AOTAutograd result (pickle): compiled forward and
                     backward with their source, runtime metadata, wrappers, backward module,
                     Triton bundles; of ``fx``: torch's own compiled FX graph (pickle)
    kernel/<id>      shared library of one native kernel that the compiled code loads
    code             Inductor's Python code, compiled: ``marshal`` by digest of the text; optional
    parts            JSON, to explain differences between keys: the parts of those components of
                     the key that their readable values do not show

and its ``meta``: ``guards`` (text, or nil), ``times_ns`` (forward, backward), ``runtime`` (what the
graph does to inputs and outputs, packed: :func:`s3cache.artifact.description` reads it; nil for
``fx``, and if it is too large), ``components`` (name to [digest, readable value] of the key),
``made_by`` (torch and platform, for people), ``first_call`` (the outputs of a first call on fake
tensors, or nil, see ``hooks/_first_calls.py``), ``relies_on`` (conditions beyond the key, as text,
or nil) and ``place`` (where the code can run; absent if wherever its key is looked up), see
``hooks/_rebuild.py`` for both.
"""

from __future__ import annotations

import functools
import hashlib
import json
import marshal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import Final

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import EntryKind
from s3cache.store import Buffer

SCHEMA = 4
#: The attribute of torch's result that holds its Conditions.
CONDITIONS = "s3cache_conditions"
_ENTRY = "entry"
_KERNEL = "kernel/"
_PARTS = "parts"
_CODE = "code"


@dataclass(frozen=True)
class Artifact:
    """The content of an entry of a compiled graph, see the module."""

    kind: EntryKind
    entry: Buffer
    kernels: Mapping[str, Buffer]  # images by id
    meta: Mapping[str, object]
    parts: Mapping[str, Mapping[str, str]]  # parts of components, by their names
    sources: Sequence[str] = ()  # Python code to run, as text

    def encode(self, key: str) -> bytes:
        sections = {_ENTRY: self.entry}
        sections |= {_KERNEL + name: image for name, image in self.kernels.items()}
        if self.sources:
            sections[_CODE] = _compiled(self.sources)
        if self.parts:
            parts = {name: dict(texts) for name, texts in self.parts.items()}
            sections[_PARTS] = json.dumps(parts, separators=(",", ":")).encode()
        return frame.encode(
            kind=self.kind,
            key=key,
            variant=variant_of(self.meta.get("guards"), self.meta.get("relies_on")),
            schema=SCHEMA,
            sections=sections,
            meta=self.meta,
        )

    @staticmethod
    def kernels_of(entry: Frame) -> dict[str, Buffer]:
        """Return images of the kernels in a verified frame, by id."""
        names = (name for name in entry.names if name.startswith(_KERNEL))
        return {name[len(_KERNEL) :]: entry.section(name) for name in names}

    @staticmethod
    def codes_of(entry: Frame) -> Callable[[str], CodeType | None]:
        """Return a function that finds the compiled code for a text in a verified frame."""

        @functools.cache
        def codes() -> Mapping[str, object]:
            if _CODE not in entry.names:
                return {}
            version, by_digest = marshal.loads(bytes(entry.section(_CODE)))  # noqa: S302 - verified
            return by_digest if version == MAGIC_NUMBER and isinstance(by_digest, dict) else {}

        def code_of(source: str) -> CodeType | None:
            content = codes().get(_digest(source))
            code = marshal.loads(content) if isinstance(content, bytes) else None  # noqa: S302
            return code if isinstance(code, CodeType) else None

        return code_of

    @staticmethod
    def parts_of(entry: Frame) -> dict[str, dict[str, str]]:
        """Return the parts of components of the key in a verified frame, if it has them."""
        if _PARTS not in entry.names:
            return {}
        try:
            parts: dict[str, dict[str, object]] = json.loads(bytes(entry.section(_PARTS)))
            return {
                name: {part: str(text) for part, text in texts.items()}
                for name, texts in parts.items()
            }
        except (AttributeError, RecursionError, ValueError):
            return {}


def _compiled(sources: Sequence[str]) -> bytes:
    codes = {
        _digest(each): marshal.dumps(compile(each, "<s3cache>", "exec", dont_inherit=True))
        for each in sources
    }
    return marshal.dumps((MAGIC_NUMBER, codes))


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()


def section_of(entry: Frame, kind: str, name: str) -> Buffer:
    """Return a section of a verified frame.

    Raises:
        CorruptError: the frame has another kind or schema, or lacks the section.
    """
    header = entry.header
    if (header.kind, header.schema) != (kind, SCHEMA) or name not in entry.names:
        found = f"{header.kind} {header.schema}"
        raise CorruptError("frame", f"has no {name} of kind {kind} and schema {SCHEMA}: {found}")
    return entry.section(name)


def variant_of(guards: object, relies_on: object = None) -> str:
    """Return the variant, which tells entries under one key apart; equal ones are equivalent."""
    conditions = f"{guards or ''}" + ("" if relies_on is None else f"\0{relies_on}")
    return hashlib.sha256(conditions.encode()).hexdigest()[:32] if conditions else ""


# -- images

#: The first bytes of a shared library: 64-bit ELF, little-endian.
ELF: Final = b"\x7fELF\x02\x01"
#: The header after them: fields 4 and 5 are the offsets of the tables of segments and sections,
#: 8 to 11 the sizes and counts of their rows, and 12 is the section of names.
ELF_HEADER: Final = struct.Struct("<10xHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQ")
_LOADED: Final = 1  # PT_LOAD


def check_image(image: Buffer) -> None:
    """Check that the dynamic loader maps nothing beyond the end of ``image``.

    The loader itself checks little, and access to such a page ends the process (SIGBUS). Images of
    other formats are left to the loader.

    Raises:
        CorruptError: the image is truncated.
    """
    if bytes(image[: len(ELF)]) != ELF:
        return
    try:
        header = ELF_HEADER.unpack_from(image, len(ELF))
        offset, size, count = header[4], header[8], header[9]
        segments = [_SEGMENT.unpack_from(image, offset + n * size) for n in range(count)]
        if all(kind != _LOADED or at + n <= len(image) for kind, _, at, _, _, n in segments):
            return
    except struct.error:
        pass
    raise CorruptError("kernel", "is truncated")
