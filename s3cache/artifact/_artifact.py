"""What an entry of a compiled graph holds, how it is described, and what is left out of it.

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
``made_by`` (torch and platform, for people), ``first_call`` (the outputs of a first call
on fake tensors, or nil, see ``hooks/_first_calls.py``) and ``relies_on`` (where inputs have to lie
in their storages, as text, or nil, see ``hooks/_conditions.py``).

torch's entries hold the text of each graph, with the line of the user's program that each node is
from, stack traces, and variables of the environment, for logs and for its profiler. None of it is
run. Who may read a bucket need not be one who may read the source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, cast

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import Level
from s3cache.store import Buffer
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTResult, CudagraphInfo, PlaceholderInfo

__all__ = [
    "CONDITIONS",
    "SCHEMA",
    "Artifact",
    "check_image",
    "describe",
    "described",
    "hidden_places",
    "hidden_source",
    "section_of",
    "variant_of",
    "without_places",
]

SCHEMA = 2
#: The attribute of torch's result that says what its code relies on beside its key.
CONDITIONS = "s3cache_conditions"
#: In the description of an object: the name of its class.
CLASS = "class"
_ENTRY = "entry"
_KERNEL = "kernel/"
_PARTS = "parts"


@dataclass(frozen=True)
class Artifact:
    """What there is to save of a compiled graph, see the module."""

    kind: Level
    entry: Buffer
    kernels: Mapping[str, Buffer]  # images by id
    meta: Mapping[str, object]
    parts: Mapping[str, Mapping[str, str]]  # what components consist of, by their names

    def encode(self, key: str) -> bytes:
        """Return this artifact as a frame under ``key``."""
        sections = {_ENTRY: self.entry}
        sections |= {_KERNEL + name: image for name, image in self.kernels.items()}
        if self.parts:
            parts = {name: dict(texts) for name, texts in self.parts.items()}
            sections[_PARTS] = json.dumps(parts, separators=(",", ":")).encode()
        variant = variant_of(self.meta.get("guards"), self.meta.get("relies_on"))
        meta = dict(self.meta)
        return frame.encode(
            kind=self.kind, key=key, variant=variant, schema=SCHEMA, sections=sections, meta=meta
        )

    @staticmethod
    def entry_of(entry: Frame, kind: Level) -> Buffer:
        """Return the pickled result in a verified frame of that kind.

        Raises:
            CorruptError: the frame is of another kind or schema, or lacks the section.
        """
        return section_of(entry, kind, _ENTRY)

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


def section_of(entry: Frame, kind: str, name: str) -> Buffer:
    """Return a section of a verified frame.

    Raises:
        CorruptError: the frame is of another kind or schema, or lacks the section.
    """
    header = entry.header
    if (header.kind, header.schema) != (kind, SCHEMA) or name not in entry.names:
        found = f"{header.kind} {header.schema}"
        raise CorruptError("frame", f"holds no {name} of kind {kind} and schema {SCHEMA}: {found}")
    return entry.section(name)


def variant_of(guards: object, relies_on: object = None) -> str:
    """Return what tells entries under one key apart: those with one are interchangeable."""
    conditions = f"{guards or ''}" + ("" if relies_on is None else f"\0{relies_on}")
    return hashlib.sha256(conditions.encode()).hexdigest()[:32] if conditions else ""


# -- its description: plain data, maps, arrays and scalars. An object is a map of its attributes.

# Fifty times what a GPT of 6 layers takes.
_MAX_PACKED_BYTES = 256 << 10
_MAX_DEPTH = 32
_MAX_TEXT = 4000
# Objects that one attribute is taken apart into; shared ones count each time.
_MAX_THINGS = 20_000
_SAID_BY_TEXT = ("device", "dtype", "layout", "memory_format")


def describe(entry: AOTResult) -> bytes | None:
    """Return all that torch's result for one graph says of it, but for its code, for a header.

    ``None`` if that is too large for one.
    """
    attrs = _attributes(entry)
    backward = entry.compiled_bw
    said = {name: attr for name, attr in attrs.items() if name not in internals.ENTRY_BULK} | {
        "runtime_metadata": entry.runtime_metadata,
        "aot_config": attrs.get("sanitized_aot_config"),
        "indices_of_inps_to_detach": attrs.get("indices_of_inps_to_detach") or (),
        "dispatch_wrappers": entry.dispatch_wrappers,
        "has_backward_module": entry.serialized_bw_module is not None,
        CONDITIONS: getattr(entry, CONDITIONS, None),
        "sanitized_aot_config": None,
    }
    plain = {name: described(attr) for name, attr in said.items()}
    if backward is not None:
        names = ("backward_state_indices", "num_symints_saved_for_bw_")
        about = {name: described(getattr(backward, name, None)) for name in names}
        plain["backward"] = described_as("Backward", about)
    return packed_plain(described_as("GraphDescription", plain))


def packed_plain(plain: object) -> bytes | None:
    """Return zlib over msgpack of a description, or ``None`` if that is too large for a header."""
    content = zlib.compress(msgpack.packb(plain, unicode_errors="replace"))
    return content if len(content) <= _MAX_PACKED_BYTES else None


def described_as(name: str, attrs: Mapping[str, object]) -> dict[str, object]:
    """Return an object of this class, with those of its attributes that are not ``None``."""
    return {CLASS: name, **{key: attr for key, attr in attrs.items() if attr is not None}}


def described(value: object, depth: int = 0, left: Iterator[int] | None = None) -> object:
    """Return any value as plain data."""
    kind, left = type(value), iter(range(_MAX_THINGS)) if left is None else left
    is_over = next(left, None) is None or depth > _MAX_DEPTH
    if value is None or kind in (bool, float):
        return value
    if isinstance(value, int) and kind is int and value.bit_length() < 64:
        return value
    if isinstance(value, (str, bytes)) and kind in (str, bytes) and len(value) <= _MAX_TEXT:
        return value
    if isinstance(value, type):
        return _name_of(value)
    if isinstance(value, Enum):
        return value.name
    if kind.__module__ == "torch" and kind.__name__ in _SAID_BY_TEXT:
        return str(value)
    if is_over:
        return described_as("Thing", {"type": _name_of(kind), "text": _text(value)})
    within = partial(described, depth=depth + 1, left=left)
    if isinstance(value, (list, tuple)):
        return list(map(within, value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(within, value), key=repr)
    if isinstance(value, Mapping):
        return {str(key): within(attr) for key, attr in value.items()}
    return _object(value, within)


def _object(value: object, within: Callable[[object], object]) -> object:
    import torch

    kind = type(value)
    if isinstance(value, internals.source.get()):
        about = {"name": internals.name_of_source(value), "description": _text(value)}
        return described_as("Source", about)
    if isinstance(value, torch.Tensor):
        names = ("shape", "dtype", "device", "requires_grad")
        attrs = {name: within(getattr(value, name)) for name in names}
        return described_as("Thing", {"type": _name_of(kind), "fields": attrs})
    if kind.__name__.endswith("ViewMeta"):
        as_tuple = getattr(value, "as_tuple", tuple)  # not every kind of view has it
        return described_as("ViewMeta", {"type": kind.__name__, "arguments": within(as_tuple())})
    is_theirs = kind.__module__.startswith("torch.") and dataclasses.is_dataclass(value)
    if is_theirs or kind.__module__.startswith(internals.DESCRIBED):
        attrs = {name: within(attr) for name, attr in _attributes(value).items()}
        return described_as(_name_of(kind), attrs)
    return described_as("Thing", {"type": _name_of(kind), "text": _text(value)})


def _attributes(theirs: object) -> dict[str, object]:
    of_class = dataclasses.fields(theirs) if dataclasses.is_dataclass(theirs) else ()
    names = [*(each.name for each in of_class), *internals.COMPUTED]
    known = {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}
    return known | getattr(theirs, "__dict__", {})


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _text(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    try:
        return (str(value) if name is None else f"{value.__module__}.{name}")[:_MAX_TEXT]
    except Exception:  # noqa: BLE001 - whatever a user's class does
        return ""


# -- what is hidden in it: where code is from

# In the text of a graph: "# File: /home/me/train.py:7 in forward, code: x = secret(x)", where other
# notes of torch's may come first.
_COMMENT = re.compile(r"^[ \t]*# (?:.*[ \t])?File: .*(?:\n|$)", re.MULTILINE)
# As tracebacks have it, with the line below, and the marks below that.
_LINE = r"[ \t]+{}.*(?:\n|$)"
_FRAME = re.compile(
    r'^[ \t]*File ".*", line \d+.*(?:\n|$)'
    rf"""(?:{_LINE.format('(?!File ")')}(?:{_LINE.format("[~^]+")})?)?""",
    re.MULTILINE,
)
# Nothing but stack traces. torch puts one of the last beside its message where a tangent is wrong.
_TRACES = {"cache_linemap", "inductor_provenance_stack_traces_str", "tangent_source_stack_traces"}
# A program that compiles the graph again, for reports to torch, with variables of the environment.
_PROGRAM = "runnable_graph_str"
_RUN = "source_code"
# What its comments name of the machine: in which file a kernel was written out.
_KERNEL_PATH = re.compile(r"(?<=# kernel path: ).*/")


def hidden_source(name: str, value: object) -> object:
    """Return an attribute of a compiled graph, or of torch's entry, without where code is from."""
    if name in _TRACES:
        return None
    if name == _PROGRAM:
        return ""
    if name == "cudagraph_info" and value is not None:
        return _without_traces(cast("CudagraphInfo", value))
    if not isinstance(value, str):
        return value
    return _KERNEL_PATH.sub("", value) if name == _RUN else _without_lines(value)


def _without_traces(info: CudagraphInfo) -> CudagraphInfo:
    return dataclasses.replace(
        info,
        placeholders=[_placeholder(each) for each in info.placeholders],
        stack_traces=[None] * len(info.stack_traces),
        cudagraph_fail_reasons=[_without_lines(each) for each in info.cudagraph_fail_reasons],
    )


def _placeholder(info: PlaceholderInfo) -> PlaceholderInfo:
    users = [_placeholder(user) for user in info.users]
    return dataclasses.replace(info, stack_trace=None, mutating_use_stack_trace=None, users=users)


def _without_lines(text: str) -> str:
    return _FRAME.sub("", _COMMENT.sub("", text))


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
