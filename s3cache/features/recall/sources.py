"""Sources: the places where Dynamo found objects, as plain data and back."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import sys
import types
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

from s3cache.features.recall import RecallReason, names
from s3cache.features.recall.sets import places_in_order
from s3cache.graph import value_at
from s3cache.torch_api import internals

#: A place where Dynamo found an object: a variable, an attribute of the object at a source, ...
Source: TypeAlias = Any
#: Plain data.
Plain: TypeAlias = Any

#: The prefix of names of the dictionary of built-in functions: each attempt to trace a frame has
#: another one. And the name that recall uses for it.
BUILTINS, OWN_BUILTINS = "__builtins_dict", "__s3cache_builtins"
#: The global names of named tuples' constructors, all alike; and recall's name for them.
NAMED_TUPLES: Final = NamedTuple("Empty", []).__new__.__globals__
OWN_NAMED_TUPLES: Final = "__s3cache_named_tuples"

# Matches names with an address, such as ``___module_math_140248_c0``.
_BY_ADDRESS = re.compile(r"^_.*\d{6,}_c\d")
#: Matches the name of a parameter or a buffer in its module.
STATE = re.compile(r"\._(parameters|buffers)\['[^']*'\]$")
# Sources of the same object as their base.
_MARKS = frozenset(
    f"{kind}NNModuleSource" for kind in ("", "Unspecialized", "UnspecializedBuiltin", "FSDP")
)
_UNREAD: Final = object()
#: An item of a set; its row has the place in the order that all processes share.
_IN_SET: Final = "NonSerializableSetGetItemSource"


class RefusedError(Exception):
    """A frame cannot be recalled; ``code`` is the short reason."""

    def __init__(self, code: RecallReason, message: str) -> None:
        super().__init__(message)
        self.code = code


class Sources:
    """The sources of a frame as rows of plain data, and the objects at them, each read once.

    A row has the kind of a source and its fields, and may refer to earlier rows.
    """

    def __init__(
        self,
        variables: Mapping[str, object],
        names_: dict[str, object],
        rows: list[Plain] | None = None,
    ) -> None:
        self.rows: list[Plain] = [] if rows is None else rows
        self.modules: dict[str, str] = {}  # names of modules by our global names for them
        self._variables, self._names = variables, names_
        self._numbers: dict[Source, int] = {}
        self._sources: dict[int, Source] = {}
        self._values: dict[int, Any] = {}
        # What Dynamo's builder of guards uses to evaluate a source.
        self._outer = {"L": variables, "G": names_}
        self._closure = names.closure_vars.get()()
        self._known: dict[Source, object] = {}

    def number(self, source: Source) -> int:
        """Return the number of the row of a source, which may be new; or raise RefusedError."""
        if (known := self._numbers.get(source)) is not None:
            return known
        kind = type(source)
        if kind.__module__ != internals.SOURCES or not dataclasses.is_dataclass(kind):
            raise RefusedError("source", f"reads by a {kind.__qualname__}")
        fields, value = _fields_of(cast("Any", kind)), _UNREAD
        row = [kind.__name__, *(self.plain(getattr(source, name)) for name in fields)]
        if kind.__name__ == "GlobalSource":
            name = str(source.global_name)
            if name.startswith(BUILTINS):
                own, value = OWN_BUILTINS, builtins_of(self._names)
            elif _is_of_named_tuple(self._names.get(name)):
                own, value = OWN_NAMED_TUPLES, NAMED_TUPLES
            elif _BY_ADDRESS.search(name):
                value = self._names.get(name)
                if not isinstance(value, types.ModuleType) or not is_imported(value):
                    raise RefusedError("global", f"reads {name}")
                own = name_of_module(value)
                self.modules[own] = value.__name__
            if value is not _UNREAD:
                row[1 + fields.index("global_name")] = own
        if kind.__name__ == _IN_SET:
            order = places_in_order(self.at(row[1 + fields.index("base")][1]))
            row[1 + fields.index("index")] = order.index(source.index)
        self.rows.append(row)
        number = self._numbers[source] = len(self.rows) - 1
        self._sources[number] = source
        if value is not _UNREAD:
            self._values[number] = value
        return number

    def plain(self, value: object) -> Plain:
        """Return a field of a source or an argument of a guard as data, or raise RefusedError."""
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, enum.Enum) and type(value).__module__ == internals.SOURCES:
            return ["enum", type(value).__name__, value.name]
        if type(value) in (tuple, list):
            return [type(value).__name__, [*map(self.plain, cast("list[object]", value))]]
        if isinstance(value, type) and value_at(value.__module__, value.__qualname__) is value:
            return ["class", value.__module__, value.__qualname__]
        if isinstance(value, type) and (alias := name_in_types(value)):
            return ["class", types.__name__, alias]
        if isinstance(value, names.source_class.get()):
            return ["source", self.number(value)]
        raise RefusedError("source", f"reads by a {type(value).__qualname__}")

    def argument(self, value: Plain) -> object:
        """Return the original of plain data."""
        if not isinstance(value, list):
            return value
        kind, *values = value
        if kind == "source":
            return self.source(values[0])
        if kind == "class":
            return value_at(*values)
        if kind == "enum":
            return getattr(names.sources.get(), values[0])[values[1]]
        items = [*map(self.argument, values[0])]
        return tuple(items) if kind == "tuple" else items

    def source(self, number: int) -> Source:
        """Return the source of a row."""
        if number not in self._sources:
            name, *values = self.rows[number]
            kind = getattr(names.sources.get(), name)
            if not (isinstance(kind, type) and issubclass(kind, names.source_class.get())):
                raise ValueError(f"{name} is not a source")
            if name == _IN_SET:
                (_, base), rank = values
                values[1] = places_in_order(self.at(base))[rank]
            fields = zip(_fields_of(kind), map(self.argument, values), strict=True)
            if name == "ImportSource":  # outside of a trace, it cannot add its guard
                source: Source = object.__new__(kind)
                for field, value in fields:
                    object.__setattr__(source, field, value)
            else:
                source = cast("Any", kind)(**dict(fields))
            self._sources[number] = source
            self._numbers[source] = number
        return self._sources[number]

    def at(self, number: int) -> Any:
        """Return the object at a source; raise any error of reading it."""
        value = self._values.get(number, _UNREAD)
        if value is _UNREAD:
            value = self._values[number] = self._read(number)
        return value

    def _read(self, number: int) -> Any:
        # Fast paths for the usual kinds: evaluating text is slow. The first field is the base.
        kind, *fields = self.rows[number]
        if kind == "LocalSource":
            return self._variables[fields[0]]
        if kind == "GlobalSource":
            return self._names[fields[0]]
        if kind in ("AttrSource", "UnspecializedParamBufferSource"):
            return getattr(self.at(fields[0][1]), fields[1])
        if kind == "DictGetItemSource" and not isinstance(fields[1], list):
            return self.at(fields[0][1])[fields[1]]
        if kind in _MARKS:
            return self.at(fields[0][1])
        if kind == "ImportSource":
            # ``__import__`` returns the package; what is not imported yet is another program.
            return sys.modules[fields[0]] and sys.modules[fields[0].partition(".")[0]]
        source = self.source(number)
        if (base := getattr(source, "base", None)) is not None:
            self._known[base] = self.at(self.number(base))
        return source.get_value(self._outer, self._closure, self._known)

    def holds(self, expression: str) -> bool:
        """Return whether a guard on sizes, a Python expression, holds."""
        functions = {**internals.guard_functions.get(), **self._closure}
        return bool(eval(expression, {**functions, **self._outer}))  # noqa: S307 - of a verified entry


def _is_of_named_tuple(scope: object) -> bool:
    """Return whether a dictionary has the global names of a named tuple's constructor."""
    if type(scope) is not dict or scope.keys() != NAMED_TUPLES.keys():
        return False
    own = {**NAMED_TUPLES, "__name__": scope["__name__"]}
    return bool(scope == own) and str(scope["__name__"]).startswith("namedtuple_")


@functools.cache
def _fields_of(kind: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if each.init]


def is_imported(module: types.ModuleType) -> bool:
    """Return whether a module is the one that is imported under its name."""
    return sys.modules.get(module.__name__) is module


def name_in_types(value: object) -> str:
    """Return the name in ``types`` of a class that has no other, such as that of ``None``."""
    return next((name for name, each in vars(types).items() if each is value), "")


def name_of_module(module: types.ModuleType) -> str:
    """Return the global name that recall uses for a module."""
    return f"__s3cache_module_{module.__name__.replace('.', '_')}"


def builtins_of(scope: dict[str, object]) -> dict[str, object]:
    """Return the dictionary of built-in functions, as Dynamo looks it up."""
    found = scope["__builtins__"]
    return vars(found) if isinstance(found, types.ModuleType) else cast("dict[str, object]", found)


def without_marks(source: Source) -> Source:
    """Return a source without marks for the kind of module."""
    while type(source).__name__ in _MARKS:
        source = source.base
    return source
