"""Describe the graph of an entry as plain data, and remove source code and paths from the entry.

A description consists of maps, arrays and scalars, with torch's names. An object is a map of its
attributes except those that are ``None``, with the name of its class under ``class``; or a map with
its text. Enumerations, classes, devices and dtypes are text.

torch's entries contain the text of each graph with lines of the user's program, stack traces, and
environment variables, for logs and for the profiler. None of it is run. Readers of a bucket may not
be allowed to read the source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, cast

import msgpack  # type: ignore[import-untyped]

from s3cache.artifact._artifact import CONDITIONS, ELF, ELF_HEADER
from s3cache.errors import CorruptError
from s3cache.frame import Header
from s3cache.store import Buffer
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTResult, CudagraphInfo, PlaceholderInfo

# Limits on the packed size (50 times that of a GPT with 6 layers), on the unpacked size, and on the
# length of an array or map.
_MAX_PACKED_BYTES = 256 << 10
_MAX_BYTES = 64 << 20
_MAX_ITEMS = 1 << 16
_MAX_DEPTH = 32
_MAX_TEXT = 4000
# How many objects the description of an attribute may have; shared objects count each time.
_MAX_THINGS = 20_000
_SAID_BY_TEXT = ("device", "dtype", "layout", "memory_format")


def describe(entry: AOTResult) -> bytes | None:
    """Describe torch's result for a graph, without its code, for the header of an entry.

    Return ``None`` if the description is too large.
    """
    said = {n: attr for n, attr in _attributes(entry).items() if n not in internals.ENTRY_BULK} | {
        "runtime_metadata": entry.runtime_metadata,
        "dispatch_wrappers": entry.dispatch_wrappers,
        "has_backward": entry.compiled_bw is not None,
        "has_backward_module": entry.serialized_bw_module is not None,
        CONDITIONS: getattr(entry, CONDITIONS, None),
    }
    plain = {name: described(attr) for name, attr in said.items() if attr is not None}
    content = zlib.compress(msgpack.packb(plain, unicode_errors="replace"))
    return content if len(content) <= _MAX_PACKED_BYTES else None


def described(value: object, depth: int = 0, left: Iterator[int] | None = None) -> object:
    """Convert any value to plain data."""
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
    within = partial(described, depth=depth + 1, left=left)
    attrs: Mapping[str, object] = {"text": _text(value)}
    if not is_over:
        if isinstance(value, (list, tuple)):
            return list(map(within, value))
        if isinstance(value, (set, frozenset)):
            return sorted(map(within, value), key=repr)
        if isinstance(value, Mapping):
            return {str(key): within(each) for key, each in value.items()}
        attrs = _said_of(value)
    known = {name: within(each) for name, each in attrs.items() if each is not None}
    return {"class": _name_of(kind), **known}


def _said_of(value: object) -> Mapping[str, object]:
    """Return the attributes that describe an object, or its text."""
    import torch

    kind = type(value)
    if isinstance(value, internals.source.get()):
        return {"name": internals.name_of_source(value), "text": _text(value)}
    if isinstance(value, torch.Tensor):
        return {
            name: getattr(value, name) for name in ("shape", "dtype", "device", "requires_grad")
        }
    if kind.__name__.endswith("ViewMeta"):
        return {"arguments": value.as_tuple()} if hasattr(value, "as_tuple") else {}
    is_theirs = kind.__module__.startswith("torch.") and dataclasses.is_dataclass(value)
    if is_theirs or kind.__module__.startswith(internals.DESCRIBED):
        return _attributes(value)
    return {"text": _text(value)}


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


def description(header: Header) -> dict[str, object] | None:
    """Return the description of the graph in the header of an entry; ``None`` if it has none.

    Needs neither torch nor the entry's sections, and unpickles nothing. Raises CorruptError if the
    description is malformed.
    """
    content = header.meta.get("runtime")
    if content is None:
        return None
    try:
        inflating = zlib.decompressobj()
        plain = inflating.decompress(content, _MAX_BYTES)
        if not inflating.eof or inflating.unused_data:
            raise ValueError("too large, truncated, or followed by other data")
        limits = dict.fromkeys(("max_array_len", "max_map_len"), _MAX_ITEMS)
        graph: object = msgpack.unpackb(plain, max_ext_len=0, **limits)
    except (zlib.error, msgpack.UnpackException, TypeError, ValueError) as exc:
        raise CorruptError("runtime", f"is malformed ({exc!r})") from None
    if not isinstance(graph, dict):
        raise CorruptError("runtime", f"describes {type(graph).__name__}")
    return graph


def inputs_and_outputs(graph: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the descriptions of all inputs and outputs of the graph, by name.

    An input has its name in the program, or ``"input 3"`` if the name is not known.
    """

    def items(owner: str, name: str) -> list[object]:
        return found if isinstance(found := _of(graph.get(owner), name), list) else []

    sources = items("sanitized_aot_config", "aot_autograd_arg_pos_to_source")
    names = {n: _of(source, "name") for n, source in enumerate(sources)}
    inputs = enumerate(items("runtime_metadata", "input_info"))
    outputs = enumerate(items("runtime_metadata", "output_info"))
    return [
        *((str(names.get(n) or f"input {n}"), each) for n, each in inputs),
        *((f"output {n}", each) for n, each in outputs),
    ]


def _of(owner: object, name: str) -> object:
    return owner.get(name) if isinstance(owner, dict) else None  # it may be malformed


# -- removing source code

# In the text of a graph: "# File: /home/me/train.py:7 in forward, code: x = secret(x)". Other notes
# of torch may come before it.
_COMMENT = re.compile(r"^[ \t]*# (?:.*[ \t])?File: .*(?:\n|$)", re.MULTILINE)
# A line of a traceback, with the line of code and the marks below it.
_LINE = r"[ \t]+{}.*(?:\n|$)"
_FRAME = re.compile(
    r'^[ \t]*File ".*", line \d+.*(?:\n|$)'
    rf"""(?:{_LINE.format('(?!File ")')}(?:{_LINE.format("[~^]+")})?)?""",
    re.MULTILINE,
)
# Attributes that consist of stack traces. torch shows one of the last when a tangent is wrong.
_TRACES = {"cache_linemap", "inductor_provenance_stack_traces_str", "tangent_source_stack_traces"}
# A program that compiles the graph again, for bug reports, with environment variables.
_PROGRAM = "runnable_graph_str"
_RUN = "source_code"
# Paths in comments: of the file that a kernel was written to, or of the user's kernel.
_KERNEL_PATH = re.compile(r"(?:(?<=# kernel path: )|(?<=# Original path: )).*/")


def hidden_source(name: str, value: object) -> object:
    """Return an attribute of a compiled graph, or of torch's entry, without origins of code."""
    if name in _TRACES:
        return None
    if name == _PROGRAM:
        return ""
    if name == "cudagraph_info" and value is not None:
        info = cast("CudagraphInfo", value)
        return dataclasses.replace(
            info,
            placeholders=[_placeholder(each) for each in info.placeholders],
            stack_traces=[None] * len(info.stack_traces),
            cudagraph_fail_reasons=[_without_lines(each) for each in info.cudagraph_fail_reasons],
        )
    if not isinstance(value, str):
        return value
    return _KERNEL_PATH.sub("", value) if name == _RUN else _without_lines(value)


def _placeholder(info: PlaceholderInfo) -> PlaceholderInfo:
    users = [_placeholder(user) for user in info.users]
    return dataclasses.replace(info, stack_trace=None, mutating_use_stack_trace=None, users=users)


def _without_lines(text: str) -> str:
    return _FRAME.sub("", _COMMENT.sub("", text))


# -- removing paths of the machine

_SECTION = struct.Struct("<IIQQQQ")
_NO_SECTION = 0  # SHT_NULL
_IN_MEMORY = 2  # SHF_ALLOC
_DEBUG = (b".debug", b".zdebug")


def without_places(image: Buffer, *prefixes: str) -> bytes:
    """Return ``image`` with debug sections zeroed, and with dots for paths below ``prefixes``.

    Both contain directories of the machine that compiled it. Nothing moves: a path keeps its length
    and its end, because linkers share the ends of strings. An image in another format, or one that
    cannot be parsed, keeps its debug sections.
    """
    mended = bytearray(image)
    with contextlib.suppress(struct.error, IndexError):
        for at, start, size in [*_debugging(image)]:
            mended[start : start + size] = bytes(size)
            struct.pack_into("<I", mended, at + 4, _NO_SECTION)
    return hidden_places(mended, *prefixes)


def hidden_places(data: Buffer, *prefixes: str) -> bytes:
    """Return ``data`` with dots for paths that begin with ``prefixes``; nothing moves."""
    hidden = bytes(data)
    for prefix in filter(None, map(str.encode, prefixes)):
        hidden = hidden.replace(prefix + b"/", b"/".ljust(len(prefix), b".") + b"/")
    return hidden


def _debugging(image: Buffer) -> Iterator[tuple[int, int, int]]:
    """Yield the offset of the header, the offset, and the size of each debug section."""
    if bytes(image[: len(ELF)]) != ELF:
        return
    header = ELF_HEADER.unpack_from(image, len(ELF))
    offset, size, count, of_names = header[5], *header[10:13]
    places = range(offset, offset + size * count, size or 1)
    _, _, _, _, start, length = _SECTION.unpack_from(image, places[of_names])
    names = bytes(image[start : start + length])
    for at in places:
        name, _, flags, _, start, length = _SECTION.unpack_from(image, at)
        is_debugging = names[name:].startswith(_DEBUG) and not flags & _IN_MEMORY
        if is_debugging and start + length <= len(image):
            yield at, start, length
