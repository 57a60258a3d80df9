"""Encode and decode the entry of a compiled graph, and unpickle it.

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

import contextlib
import dataclasses
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import ClassVar, Final, cast

from s3cache import frame
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.stats import EntryKind
from s3cache.store import Buffer
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

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
            codes = {
                _digest(text): marshal.dumps(compile(text, "<s3cache>", "exec", dont_inherit=True))
                for text in self.sources
            }
            sections[_CODE] = marshal.dumps((MAGIC_NUMBER, codes))
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
        with contextlib.suppress(AttributeError, KeyError, RecursionError, ValueError):
            parts: dict[str, dict[str, object]] = json.loads(bytes(entry.section(_PARTS)))
            return {
                name: {part: str(text) for part, text in texts.items()}
                for name, texts in parts.items()
            }
        return {}


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()


def section_of(entry: Frame, kind: str, name: str) -> Buffer:
    """Return a section of a verified frame of this kind; raise CorruptError if it has none."""
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
    """Raise CorruptError if the dynamic loader would map pages beyond the end of ``image``.

    The loader itself checks little, and access to such a page ends the process (SIGBUS). Images of
    other formats are left to the loader.
    """
    if bytes(image[: len(ELF)]) != ELF:
        return
    with contextlib.suppress(struct.error):
        header = ELF_HEADER.unpack_from(image, len(ELF))
        offset, size, count = header[4], header[8], header[9]
        segments = [_SEGMENT.unpack_from(image, offset + n * size) for n in range(count)]
        if all(kind != _LOADED or at + n <= len(image) for kind, _, at, _, _, n in segments):
            return
    raise CorruptError("kernel", "is truncated")


# -- unpickling: what is called, and what is data
#
# A pickle may name and call anything that Python can import. The pickle of an entry may only name
# and call the list in ``torch_api/internals.py``. This is a thin second line of defence behind
# digests and signatures: an entry contains native code and Python source, which run with the graph,
# and a listed function makes a graph module of its source. It stops pickles that run or import
# other code while they are read.
#
# A few entries also name data classes and enumerations of torch and some other packages, names
# defined in a module of the program that this process has imported, and nodes of sympy's
# expressions. They are restored without a call of their constructors, functions or
# ``__setstate__``.

# Modules of these packages may be imported for an entry: the import has no other effect.
_IMPORTABLE: Final = frozenset({"torch", "sympy", "numpy", "triton"})
# Packages with functions that run their arguments or load files: allow only their data, and listed
# names.
_KNOWN: Final = frozenset({"torch", "functorch", "torchgen", "sympy", "mpmath", "numpy", "s3cache"})
# Packages with classes that may have their own __setstate__.
_SET_STATES: Final = frozenset({"dataclasses", "torch", "sympy", "triton"})
_WOULD_RUN: Final = "would run code while an entry is read"

_Load = Callable[["_Careful"], None]
_LOADS: Final[Mapping[int, _Load]] = vars(pickle._Unpickler)["dispatch"]


def unpickle(content: Buffer, instead: Mapping[str, Function[object]] | None = None) -> object:
    """Unpickle the verified bytes of an entry.

    ``instead`` adds functions to call in place of those that the bytes name. Raises CorruptError
    if they name or call something that no compiled graph needs, and any error of unpickling.
    """
    stand_ins = INSTEAD if instead is None else {**INSTEAD, **instead}
    try:
        return _load(_Listed(io.BytesIO(content), stand_ins))
    except _UnlistedError:
        return _load(_Careful(io.BytesIO(content), stand_ins))


def _load(reader: _Listed | _Careful) -> object:
    try:
        return reader.load()
    except BaseException:
        # A partly unpickled graph has no attributes, and torch's __del__ reads one: Python would
        # print the error on stderr.
        for made in reader.memo.copy().values():
            if isinstance(made, internals.compiled_graph.get()):
                made.__dict__.setdefault(internals.RUNNER, None)
        raise


class _UnlistedError(Exception):
    """The pickle names something that is not listed."""


class _Listed(pickle.Unpickler):
    """Unpickler that accepts listed names only, which is enough for nearly every entry."""

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


# -- what may be named


def is_listed(module: str, name: str) -> bool:
    """Return whether an entry may name and call ``name`` in ``module``."""
    return f"{module}.{name}" in internals.UNPICKLED or (
        module == internals.SOURCES and name.isidentifier() and name.endswith("Source")
    )


def check_imported(module: str, name: str) -> None:
    """Raise :class:`CorruptError` unless the module is imported, or may be imported here."""
    package = module.partition(".")[0]
    if not (
        module in sys.modules
        or package in _IMPORTABLE
        or (package in sys.stdlib_module_names and is_listed(module, name))
    ):
        raise CorruptError(f"name {module}.{name}", "is in a module that is not imported here")


def computes(module: str, name: str) -> bool:
    """Return whether this is a function on tensors, such as an activation that a subclass keeps."""
    return module in internals.COMPUTING or (module == internals.FUNCTIONS and name != "from_file")


def refused(named: object, why: str = "is nothing that a compiled graph needs") -> CorruptError:
    """Return the error for a name, or for an object, that an entry must not use."""
    name = named
    if not isinstance(named, str):
        names = [getattr(named, each, "") for each in ("__module__", "__qualname__")]
        name = ".".join(map(str, names)) if all(names) else f"of a {type(named).__qualname__}"
    opaque = internals.script_object.get()
    if name == f"{opaque.__module__}.{opaque.__qualname__}":
        why = "has a device mesh, as each DTensor has, which torch cannot save with a whole graph"
        return CorruptError("output", f"{why}: return x.to_local() to share the graph as a whole")
    listed = "what graphs need is listed in torch_api/internals.py"
    return CorruptError(f"name {str(name)[:200]}", f"{why} ({listed})")


def _member(owner: object, name: str) -> object:
    """Replace ``getattr``, with which members of enumerations and operators may be pickled."""
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner.__members__[name]
    if isinstance(owner, type) and computes(f"{owner.__module__}.{owner.__name__}", name):
        found: object = getattr(owner, name)
        if isinstance(found, BuiltinFunctionType):
            return found
    raise CorruptError(f"attribute {name[:80]}", "is nothing that a compiled graph needs")


def _storage(content: bytes) -> object:
    """Replace torch's own function, which unpickles any class."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def _subclassed(function: object, *args: object) -> object:
    """Replace torch's own function, which calls any function."""
    if not isinstance(function, FunctionType) or not is_listed(
        function.__module__, function.__qualname__
    ):
        raise refused(function, "is called while an entry is read")
    return internals.rebuild_subclass.get()(function, *args)


#: Functions to call in place of those that a pickle names.
INSTEAD: Final[Mapping[str, Function[object]]] = {
    "_functools.reduce": lambda _, types: functools.reduce(operator.or_, types),  # unions of types
    "builtins.getattr": _member,
    internals.UNPICKLED_STORAGE: _storage,
    internals.UNPICKLED_SUBCLASS: _subclassed,
}


# -- entries with names beyond the list


class _Careful(pickle._Unpickler):
    """Calls listed names only; makes other objects without their constructors and functions."""

    # Python's slow unpickler in Python, which lets us intercept calls.

    stack: list[object]
    memo: dict[int, object]
    dispatch: ClassVar[dict[int, _Load]] = dict(_LOADS)  # type: ignore[assignment]

    def __init__(self, content: io.BytesIO, stand_ins: Mapping[str, Function[object]]) -> None:
        super().__init__(content)
        self._stand_ins = stand_ins
        self._listed: list[object] = list(stand_ins.values())

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in self._stand_ins:
            return self._stand_ins[full]
        check_imported(module, name)
        target: object = super().find_class(module, name)
        if is_listed(module, name):
            self._listed.append(target)
        elif not _may_be_named(module, name, target):
            raise refused(full)
        return target

    def _is_listed(self, found: object) -> bool:
        return any(found is each for each in self._listed)

    def _load_reduce(self) -> None:
        function, args = self.stack[-2:]
        if not (
            self._is_listed(function)
            or isinstance(function, enum.EnumMeta)
            or (isinstance(function, type) and _is_exception(function))
            or _is_node(function, args)
        ):
            raise refused(function, "is called while an entry is read")
        _LOADS[pickle.REDUCE[0]](self)

    def _load_new(self, *, has_names: bool = False) -> None:
        cls, args, *names = self.stack[-3 if has_names else -2 :]
        operands = (*cast("Iterable[object]", args), *names)
        if not (self._is_listed(cls) or _is_inert(cls) or _is_node(cls, operands)):
            raise refused(cls, _WOULD_RUN)
        _LOADS[(pickle.NEWOBJ_EX if has_names else pickle.NEWOBJ)[0]](self)

    def _load_build(self) -> None:
        instance = self.stack[-2]
        sets = getattr(type(instance), "__setstate__", None)
        if isinstance(instance, (type, FunctionType, ModuleType)) or (
            isinstance(sets, FunctionType)
            and not self._is_listed(type(instance))
            and sets.__module__.partition(".")[0] not in _SET_STATES
        ):
            raise refused(type(instance), _WOULD_RUN)
        _LOADS[pickle.BUILD[0]](self)

    def _load_old(self) -> None:
        raise CorruptError("entry", "is a pickle of protocol 1 or before")

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_new
    dispatch[pickle.NEWOBJ_EX[0]] = functools.partial(_load_new, has_names=True)
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.OBJ[0]] = dispatch[pickle.INST[0]] = _load_old


def _may_be_named(module: str, name: str, target: object) -> bool:
    import torch

    package = module.partition(".")[0]
    if isinstance(target, (FunctionType, BuiltinFunctionType)) and computes(module, name):
        return target.__module__ is None or target.__module__ == module
    if not isinstance(target, (type, FunctionType)):
        # A type or format of data
        return type(target).__module__ == "torch" and type(target).__name__ in internals.FORMATS
    # Only under the name of its definition, not where it was imported.
    if (target.__module__, target.__qualname__) != (module, name):
        return False
    is_of_python = package in sys.stdlib_module_names
    if isinstance(target, type):
        if _is_exception(target):
            return True
        is_named = issubclass(target, tuple) and hasattr(target, "_fields")
        if is_named or isinstance(target, enum.EnumMeta) or dataclasses.is_dataclass(target):
            return not is_of_python
        is_tensor = issubclass(target, torch.Tensor)
        if is_tensor or target.__module__ == internals.VIEWS or _is_expression(target):
            return True
    return package not in _KNOWN and not is_of_python


def _is_expression(cls: type) -> bool:
    """Return whether objects of this class are expressions over sizes, or their operands."""
    import sympy  # type: ignore[import-untyped]

    return issubclass(cls, sympy.Basic)


def _is_exception(cls: type) -> bool:
    return cls.__module__ == "builtins" and issubclass(cls, BaseException)


def _is_inert(cls: object) -> bool:
    """Return whether an object of ``cls`` can be created without running any of its code."""
    if not isinstance(cls, type) or hasattr(cls, "__del__"):
        return False
    constructor = cls.__new__
    # That of a NamedTuple is made by Python, in a generated module.
    return isinstance(constructor, BuiltinFunctionType) or (
        issubclass(cls, tuple) and constructor.__module__.startswith("namedtuple_")
    )


def _is_node(cls: object, args: object) -> bool:
    """Return whether this makes a sympy node of nodes and numbers; sympy would evaluate text."""
    if not (isinstance(cls, type) and _is_expression(cls)):
        return False
    operands: list[object] = []
    for arg in cast("Iterable[object]", args):
        operands += arg.values() if isinstance(arg, dict) else [arg]
    return all(
        operand is None or isinstance(operand, (int, float)) or _is_expression(type(operand))
        for operand in operands
    )
