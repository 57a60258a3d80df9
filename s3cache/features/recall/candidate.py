"""Candidates: Dynamo's reads, guards and bytecode of a frame, and the graph that it calls.

An entry of kind ``recall`` has one section, ``frame``: msgpack of the fields of a
:class:`Candidate`, by name. The bytecode is in Python's own format (``marshal``), so its key
includes the version of Python. Candidates under one key differ in their content.
"""

from __future__ import annotations

import hashlib
import marshal
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.artifact import SCHEMA, section_of
from s3cache.entries import LabelledKey
from s3cache.errors import CorruptError
from s3cache.features.recall.sources import Plain
from s3cache.frame import Frame
from s3cache.torch_api import internals

#: The kind of the entries of recall.
KIND: Final = "recall"
_SECTION = "frame"
_OF_ONE_KEY = frozenset({"TYPE_MATCH", "DICT_CONTAINS", "DICT_NOT_CONTAINS"})


@dataclass
class Candidate:
    """Dynamo's result for a frame, as plain data. A source is the number of a row.

    Attributes:
        rows: sources; a row may refer to earlier rows.
        reads: source, digest of its content, the first read of the same object, and its role.
        guards: kind, source, positional and keyword arguments, and the value that was guarded.
        sizes: sizes and strides of tensors by source; nil matches any.
        groups: the groups of parameters for which an optimizer makes its state while Dynamo traces:
            its source, the length of its state before, and the arguments of the method.
        late: the first read that needs this state.
        symbols: sources of numbers that are bound by the expressions only.
        expressions: conditions on sizes and numbers, in Python.
        key_order: sources of dictionaries with an order that matters.
        questions: what Dynamo asked the process: kind, objects, and the answer as text.
        absent: names in the traced code that a module lacks, by module; ``""`` is the frame's own.
        libraries: top-level packages, each with version and digest.
        imports: modules by the global name that Dynamo gave them.
        code: the bytecode.
        resumes: code that resumes after a graph break, by placeholder, with its name.
        graphs: key and input sources of each graph, and how many of them it holds; DDP may split a
            frame into several. The key is "" if entries under it must not be used.
        traced: the graph itself, for :class:`.traced_graph.Compilation`; nil if its key is enough,
            until a lookup under the key has missed.
        split: how DDP's parts are put together, see ``torch_api/dynamo.py``; nil for one graph.
        compiled: the placeholder of the function that the bytecode calls.
        facts: the layout of inputs in memory, as text.
        dynamic: inputs with sizes that Dynamo remembers, by Dynamo's names, with those that it
            let vary.
        lowered: digests of the settings under which a backward would be lowered.
        outcome: a digest of the result of the trace, to compare two traces.
        traces: each process that traced it: a random name, the time in seconds since 1970, and
            the digest of the facts of its program.
    """

    rows: list[Any] = field(default_factory=list)
    reads: list[Any] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    late: int = -1
    symbols: list[int] = field(default_factory=list)
    expressions: list[str] = field(default_factory=list)
    key_order: list[int] = field(default_factory=list)
    questions: list[Any] = field(default_factory=list)
    absent: list[Any] = field(default_factory=list)
    libraries: list[Any] = field(default_factory=list)
    imports: list[Any] = field(default_factory=list)
    code: bytes = b""
    resumes: list[Any] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)
    traced: list[Any] | None = None
    split: list[Any] | None = None
    compiled: str = ""
    facts: list[str] = field(default_factory=list)
    dynamic: list[Any] = field(default_factory=list)
    lowered: list[Any] = field(default_factory=list)
    outcome: bytes = b""
    traces: list[Any] = field(default_factory=list)

    def read_as_a_whole(self) -> set[int]:
        """Return the sources that the frame reads in other ways than by single keys."""
        guarded = {number for kind, number, *_ in self.guards if kind not in _OF_ONE_KEY}
        return guarded.union(self.key_order)

    @property
    def has_keys(self) -> bool:
        """Whether the graphs are looked up under their keys."""
        return all(key for key, *_ in self.graphs)

    @property
    def wildcards(self) -> int:
        """The number of sizes and numbers that match any value; fewer is a better fit."""
        dims = sum(each.count(None) for _, *both in self.sizes for each in both)
        return int(dims + len(self.symbols))

    def encode(self, key: LabelledKey) -> bytes:
        """Return a frame under ``key``."""
        return encoded(key, _SECTION, asdict(self), self.variant)

    @property
    def variant(self) -> str:
        """A digest of reads and result, which tells candidates under one key apart."""
        return hashlib.sha256(f"{self.condition} {self.outcome.hex()}".encode()).hexdigest()[:32]

    @property
    def condition(self) -> str:
        """A digest of reads and guards: two results under one condition are a mistake."""
        asked = [self.guards, self.questions, self.sizes, self.expressions, self.groups]
        values = self.traced[-1] if self.traced and not self.has_keys else None
        parts = [self.rows, self.reads, *asked, values]
        return hashlib.sha256(msgpack.packb(parts)).hexdigest()[:32]

    @classmethod
    def decode(cls, entry: Frame) -> Candidate:
        """Read a verified frame; raise CorruptError for other kinds, and if it is malformed."""
        try:
            values = msgpack.unpackb(bytes(section_of(entry, KIND, _SECTION)))
            if set(values) != {*FIELDS.split()}:
                raise ValueError("other fields")
            return cls(**values)
        except CorruptError:
            raise
        except Exception as exc:
            raise CorruptError("entry", f"is not a candidate of recall ({exc})") from exc


#: What an entry contains, for the key: a process does not find what it cannot read.
FIELDS: Final = " ".join(each.name for each in fields(Candidate))


def encoded(key: LabelledKey, section: str, content: object, variant: str = "") -> bytes:
    """Return a frame with one section of plain data."""
    return frame.encode(
        kind=KIND,
        key=str(key),
        variant=variant,
        schema=SCHEMA,
        sections={section: msgpack.packb(content)},
        meta={"components": key.about},
    )


# -- bytecode, with nested code


_ODD = "s3cache constant"


def packed(code: types.CodeType, row_of: Callable[[object], Plain | None]) -> bytes:
    """Return code as bytes, without the name of its file.

    Constants that ``marshal`` refuses become the plain data that ``row_of`` returns.

    Raises:
        ValueError: the code has another constant that Python's own compiler never makes.
    """

    def write(value: object) -> object:
        return value if (row := row_of(value)) is None else (_ODD, row)

    return marshal.dumps(_changed(internals.with_filename(code, ""), write))


def unpacked(content: bytes, file: str, constant_of: Callable[[Plain], object]) -> types.CodeType:
    """Return the code in the bytes of a verified entry, with the name of a file."""

    def read(value: Any) -> object:
        is_odd = type(value) is tuple and value[:1] == (_ODD,)
        return constant_of(value[1]) if is_odd else value

    code = marshal.loads(content)  # noqa: S302
    if not isinstance(code, types.CodeType):
        raise CorruptError("entry", "contains no code")
    return internals.with_filename(_changed(code, read), file)


def renamed(code: types.CodeType, names: Mapping[str, str]) -> types.CodeType:
    """Return code with other global names."""
    return _changed(code, lambda each: each, names)


def _changed(
    code: types.CodeType, change: Callable[[Any], object], names: Mapping[str, str] = {}
) -> types.CodeType:
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _changed(each, change, names) if isinstance(each, types.CodeType) else change(each)
            for each in code.co_consts
        ),
    )


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes_in(each)


def names_in(code: types.CodeType) -> set[str]:
    """Return all global names and attributes in code."""
    return {name for each in _codes_in(code) for name in each.co_names}


def constants_in(code: types.CodeType) -> Iterator[object]:
    """Yield all constants in code, except code."""
    constants = (constant for each in _codes_in(code) for constant in each.co_consts)
    return (each for each in constants if not isinstance(each, types.CodeType))


# -- reads


def digest(text: str) -> bytes:
    """Return the digest of a text of :class:`.content.ContentDescriber`."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest()


def is_dense(value: object) -> bool:
    """Return whether a value is a tensor with its own sizes and strides."""
    import torch

    return isinstance(value, torch.Tensor) and value.layout is torch.strided


#: Objects that are made at every access, or shared by equal values.
BY_VALUE = (int, float, str, bytes, tuple, types.BuiltinFunctionType, types.MethodWrapperType)
_WITHOUT_ALIAS = (*BY_VALUE, type(None), complex, types.MethodType, types.MappingProxyType)


def first_read(value: object, first: dict[int, int], number: int) -> int:
    """Return the number of the first read of the same object, or ``number``."""
    is_alone = isinstance(value, _WITHOUT_ALIAS)
    return number if is_alone else first.setdefault(id(value), number)
