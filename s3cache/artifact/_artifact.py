"""What an entry of a compiled graph holds, and how it is read.

Sections of a frame of kind ``aot``, a whole graph, or ``fx``, a forward or backward by Inductor::

    entry            of ``aot``: torch's own AOTAutograd result (pickle): compiled forward and
                     backward with their source, runtime metadata, wrappers, backward module,
                     Triton bundles; of ``fx``: torch's own compiled FX graph (pickle)
    kernel/<id>      shared library of one native kernel that the compiled code loads
    code             the Python that Inductor wrote, compiled: ``marshal`` by digest of the text;
                     absent in entries that were made without
    parts            JSON, to explain why another key is not this one: what components of the key
                     consist of, where the readable value does not say it

and its ``meta``: ``guards`` (text, or nil), ``times_ns`` (forward, backward), ``runtime`` (what the
graph does to inputs and outputs, packed: :func:`s3cache.artifact.description` reads it; nil for
``fx``, and where it is too large), ``components`` (name to [digest, readable value] of the key),
``made_by`` (torch and platform, for people), ``first_call`` (the outputs of a first call
on fake tensors, or nil, see ``hooks/_first_calls.py``), ``relies_on`` (what must be so beside the
key, as text, or nil) and ``place`` (where the code can run; absent if wherever its key is found),
see ``hooks/_conditions.py`` for both.

A pickle may name anything that Python can import, and call it. That of an entry may name and call
what is listed (``torch_api/internals.py``); what more it may name, and how, is in ``_careful.py``.
It is a second line, behind digests and signatures, and a thin one: what is unpickled holds native
code and Python source that run when the graph does, and a listed function makes a graph module of
its source. What it stops is a pickle that runs something else while it is read, and what would be
imported for it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import json
import marshal
import operator
import pickle
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import TYPE_CHECKING, Final

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import Level
from s3cache.store import Buffer
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.artifact._careful import Careful

SCHEMA = 4
#: The attribute of torch's result that says what its code relies on beside its key.
CONDITIONS = "s3cache_conditions"
_ENTRY = "entry"
_KERNEL = "kernel/"
_PARTS = "parts"
_CODE = "code"


@dataclass(frozen=True)
class Artifact:
    """What there is to save of a compiled graph, see the module."""

    kind: Level
    entry: Buffer
    kernels: Mapping[str, Buffer]  # images by id
    meta: Mapping[str, object]
    parts: Mapping[str, Mapping[str, str]]  # what components consist of, by their names
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
        """Return what finds compiled code for a text in a verified frame, if it is there."""

        @functools.cache
        def all_of_it() -> Mapping[str, object]:
            version, found = marshal.loads(bytes(entry.section(_CODE)))  # noqa: S302 - verified
            return found if version == MAGIC_NUMBER and isinstance(found, dict) else {}

        def code_of(source: str) -> CodeType | None:
            if _CODE not in entry.names:
                return None
            content = all_of_it().get(_digest(source))
            code = marshal.loads(content) if isinstance(content, bytes) else None  # noqa: S302
            return code if isinstance(code, CodeType) else None

        return code_of

    @staticmethod
    def parts_of(entry: Frame) -> dict[str, dict[str, str]]:
        """Return what components of its key consist of, if a verified frame says so."""
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


# -- images

#: How a shared library begins: 64-bit ELF, little-endian.
ELF: Final = b"\x7fELF\x02\x01"
#: The header behind that: the tables of segments and sections begin at what 4 and 5 of these say,
#: the size and count of their rows are 8 to 11, and 12 is the section of names.
ELF_HEADER: Final = struct.Struct("<10xHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQ")
_LOADED: Final = 1  # PT_LOAD


def check_image(image: Buffer) -> None:
    """Check that the dynamic loader maps nothing beyond the end of ``image``.

    It checks little by itself, and touching such a page ends the process (SIGBUS). Images of
    another format are left to the loader.

    Raises:
        CorruptError: the image is cut short.
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
    raise CorruptError("kernel", "is cut short")


# -- the pickle


def unpickled(content: Buffer, instead: Mapping[str, Function[object]] | None = None) -> object:
    """Return what is in the verified bytes of an entry.

    ``instead`` adds functions to call in place of those that the bytes name.

    Raises:
        CorruptError: it names, or calls, what no compiled graph needs.
        Exception: whatever unpickling meets.
    """
    stand_ins = INSTEAD if instead is None else {**INSTEAD, **instead}
    try:
        return _load(_Listed(io.BytesIO(content), stand_ins))
    except _UnlistedError:
        from s3cache.artifact._careful import Careful

        return _load(Careful(io.BytesIO(content), stand_ins))


def _load(reader: _Listed | Careful) -> object:
    try:
        return reader.load()
    except BaseException:
        # Compiled graphs that were only begun have no attributes yet, and torch's __del__ asks for
        # one: Python would print that on stderr.
        for made in reader.memo.copy().values():
            if isinstance(made, internals.compiled_graph.get()):
                made.__dict__.setdefault(internals.RUNNER, None)
        raise


class _UnlistedError(Exception):
    """It names something that has to be read with care."""


class _Listed(pickle.Unpickler):
    """Knows what is listed, and nothing else: nearly every entry needs no more."""

    def __init__(self, content: io.BytesIO, stand_ins: Mapping[str, Function[object]]) -> None:
        super().__init__(content)
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> object:
        instead = self._stand_ins.get(f"{module}.{name}") or internals.found_late(module, name)
        if instead is not None:
            return instead
        if not is_listed(module, name):
            raise _UnlistedError
        check_imported(module, name)
        return super().find_class(module, name)


# Modules of these may be imported for an entry: that does nothing else.
_IMPORTABLE: Final = frozenset({"torch", "sympy", "numpy", "triton"})


def is_listed(module: str, name: str) -> bool:
    """Return whether an entry may name and call what ``module`` has by that name."""
    return f"{module}.{name}" in internals.UNPICKLED or (
        module == internals.SOURCES and name.isidentifier() and name.endswith("Source")
    )


def check_imported(module: str, name: str) -> None:
    """Raise :class:`CorruptError` unless the module is there, or may be imported for an entry."""
    package = module.partition(".")[0]
    if not (
        module in sys.modules
        or package in _IMPORTABLE
        or (package in sys.stdlib_module_names and is_listed(module, name))
    ):
        raise CorruptError(f"name {module}.{name}", "is of a module that is not imported here")


def computes(module: str, name: str) -> bool:
    """Return whether this is a function over tensors, as an activation that a subclass keeps."""
    return module in internals.COMPUTING or (module == internals.FUNCTIONS and name != "from_file")


def refused(found: object, why: str = "is nothing that a compiled graph needs") -> CorruptError:
    """Return the error for a name, or for an object, that an entry must not use."""
    name = found
    if not isinstance(found, str):
        names = [getattr(found, each, "") for each in ("__module__", "__qualname__")]
        name = ".".join(map(str, names)) if all(names) else f"of a {type(found).__qualname__}"
    listed = "what graphs need is listed in torch_api/internals.py"
    return CorruptError(f"name {str(name)[:200]}", f"{why} ({listed})")


def _member(owner: object, name: str) -> object:
    """Stand in for ``getattr``, by which members of enumerations and operators may be pickled."""
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner.__members__[name]
    if isinstance(owner, type) and computes(f"{owner.__module__}.{owner.__name__}", name):
        found: object = getattr(owner, name)
        if isinstance(found, BuiltinFunctionType):
            return found
    raise CorruptError(f"attribute {name[:80]}", "is nothing that a compiled graph needs")


def _storage(content: bytes) -> object:
    """Stand in for torch's own, which unpickles by any class."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def _subclassed(function: object, *args: object) -> object:
    """Stand in for torch's own, which calls any function."""
    if not isinstance(function, FunctionType) or not is_listed(
        function.__module__, function.__qualname__
    ):
        raise refused(function, "is called while an entry is read")
    return internals.rebuild_subclass.get()(function, *args)


#: What is called in the place of what a pickle names.
INSTEAD: Final[Mapping[str, Function[object]]] = {
    "_functools.reduce": lambda _, types: functools.reduce(operator.or_, types),  # unions of types
    "builtins.getattr": _member,
    internals.UNPICKLED_STORAGE: _storage,
    internals.UNPICKLED_SUBCLASS: _subclassed,
}
