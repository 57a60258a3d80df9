"""Turn objects into text that is equal in another process only for the same object.

:class:`Describer` is the engine: constants, containers, enumerations and wrappers of code have the
same text everywhere. Its subclasses decide about code and other objects: torch's own key
(``_graph.py``) and features describe them by content, :func:`identity` by their origin.

Code that generates code is identified by its own ``uuid()``, or by its registered version.
Otherwise its distribution identifies it, with the version and a digest of the source file. Code
without any of these has no identity, only a :func:`rough_identity`, which tells programs apart.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import _s3cache_process
from s3cache.graph._origin import NATIVE, is_code, is_plain, origin_of, wrapped_parts
from s3cache.torch_api import internals
from s3cache.util.snapshot import ABSENT, CALLS, content_of

if TYPE_CHECKING:
    from torch import device
    from torch.fx import GraphModule, Node

#: Types of constants with a complete ``repr``.
PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
PLAIN_KINDS = frozenset(PLAIN)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_SETS = (set, frozenset, WeakSet)
_MAPPINGS = (MappingProxyType, WeakKeyDictionary, WeakValueDictionary)
_CONSTANTS = frozenset({"device", "dtype", "layout", "memory_format", "Size"})
_MAX_PARTS = 10_000
_Object = TypeVar("_Object")

#: Returns the version that the user registered for a function, operator, class or module, if any.
RegisteredVersion: TypeAlias = Callable[[object], "str | None"]


class UnidentifiedError(Exception):
    """Some object has no text, or some code no identity."""

    def __init__(self, message: str, about: object = None) -> None:
        super().__init__(message)
        self.about = about  # the function, class or object without one


def qualified_name(target: object) -> str:
    """Return the module and name of a function or class, or of an object's class."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        target = type(target)
        name = target.__qualname__
    return f"{getattr(target, '__module__', None)}.{name}"


def without_index(value: device, current: device | None) -> device:
    """Return ``value`` without its index if it is the ``current`` device.

    Any other constant of torch is returned unchanged.
    """
    return type(value)(value.type) if current is not None and value == current else value


class Describer:
    """The engine; subclasses override :meth:`special`, :meth:`code` and :meth:`other`.

    Attributes:
        device: the device to write without its index.
    """

    max_depth = 8

    def __init__(self, device: device | None = None) -> None:
        self.device = device
        self._depth = 0
        # A step has hundreds of inputs. Objects are kept, so that their ids stay unique.
        self._texts: dict[int, tuple[object, str | None]] = {}

    def of(self, value: object) -> str:
        """Return the text of a value.

        Raises:
            UnidentifiedError: it has none.
        """
        kind = type(value)
        if kind in PLAIN_KINDS:
            return self.plain(value)
        text = self.special(value)
        if text is not None:
            return text
        if kind is list or kind is tuple:
            return self.all(kind.__name__, cast("list[object]", value))
        if kind is dict:  # code may depend on the order
            return self.all("dict", chain(*cast("dict[object, object]", value).items()))
        if isinstance(value, _SETS):  # the order depends on the hash seed
            state = None if kind in _SETS else getattr(value, "__dict__", None)
            return self.all(kind.__qualname__, value, is_sorted=True) + (
                self.of(state) if state else ""
            )
        if isinstance(value, _MAPPINGS):
            return f"{kind.__qualname__} {self.of(dict(value))}"
        if isinstance(value, enum.Enum):
            return f"{kind.__module__}.{kind.__qualname__}.{value.name}={self.of(value.value)}"
        if kind.__module__ == "torch" and kind.__name__ in _CONSTANTS:
            return str(without_index(cast("device", value), self.device))
        wrapped = wrapped_parts(value)
        if wrapped is not None:
            return self.all(kind.__name__, wrapped)
        if isinstance(value, (FunctionType, type, types.ModuleType, *NATIVE)):
            return self.code(value)
        return self.other(value)

    def all(self, name: str, values: Iterable[object], *, is_sorted: bool = False) -> str:
        """Return the texts of several values that belong to one with a name."""
        if self._depth >= self.max_depth:
            return self.refuse("refers to too much", values)
        self._depth += 1
        try:
            texts = [*map(self.of, values)]
        finally:
            self._depth -= 1
        return f"{name}({', '.join(sorted(texts) if is_sorted else texts)})"

    def once(self, value: _Object, describe: Callable[[_Object], str | None]) -> str | None:
        """Return ``describe(value)``; call it once for each object."""
        memo = self._texts.get(id(value))
        if memo is None:
            memo = self._texts[id(value)] = value, describe(value)
        return memo[1]

    def plain(self, value: object) -> str:
        """Return the text of a constant of Python."""
        return repr(value)

    def special(self, value: object) -> str | None:
        """Return the text of a value that has its own, before all other rules."""
        return None

    def code(self, value: object) -> str:
        """Return the text of a function, a class, a module, or a function in C."""
        return self.other(value)

    def other(self, value: object) -> str:
        """Return the text of any other object."""
        return self.refuse(f"holds a {qualified_name(value)}", value)

    def refuse(self, message: str, value: object) -> str:
        """Raise the error for an object without a text, or return one in its place."""
        raise UnidentifiedError(message, value)


# -- identities


def identity(value: object, registered_version: RegisteredVersion = lambda _: None) -> str:
    """Return a text that is equal in another process only for the same code.

    Raises:
        UnidentifiedError: some code in ``value`` has no identity; the error names it.
    """
    return _Identifier(registered_version, strict=True).of(value)


def rough_identity(value: object, registered_version: RegisteredVersion = lambda _: None) -> str:
    """Return the same without the state of the code, and never refuse.

    Code outside of distributions is identified by the digest of its source file. A wrapper that
    counts its calls has the same text before and after.
    """
    return _Identifier(registered_version, strict=False).of(value)


class _Identifier(Describer):
    def __init__(self, registered_version: RegisteredVersion, *, strict: bool) -> None:
        super().__init__()
        self._registered_version = registered_version
        self._strict = strict
        self._left = _MAX_PARTS

    def plain(self, value: object) -> str:
        return repr(value) if self._strict else ""

    def special(self, value: object) -> str | None:
        self._left -= 1
        if self._left < 0:
            return self.refuse("refers to too much", value)
        if value is ABSENT:
            return "nothing"
        version = self._registered_version(value)
        if version is not None:
            return f"version {version}"
        uuid = _uuid_of(value)
        if uuid is not None:
            return f"{qualified_name(type(value))} {constant_text(uuid)}"
        if internals.is_operator(value):
            return f"{type(value).__qualname__} {value}"
        if isinstance(value, PLAIN) and not isinstance(value, enum.Enum):
            return self.plain(value)
        if type(value) is internals.ordered_set.get():
            return self.of(list(internals.inside_of_ordered_set(value)))
        base = next((each for each in _CONTAINERS if isinstance(value, each)), None)
        if base is not None and not self._strict:
            return type(value).__name__
        if base is not None and type(value) is not base:
            return f"{type(value).__name__} {self.of(cast('type', base)(value))}"
        return None

    def code(self, value: object) -> str:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return self._located(f"module {value.__name__}", value)
        if isinstance(value, type):
            return self._located(qualified_name(value), value)
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        owner = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
        return self._located(f"{owner.__name__}.{getattr(value, '__name__', '')}", value)

    def _function(self, function: FunctionType) -> str:
        kind, code = origin_of(function).kind, CALLS.own_code(function)
        if kind == "torch":
            file = code.co_filename.removeprefix(internals.torch_directory())
            text = f"{file}:{code.co_firstlineno}:{code.co_name}:{code_digest(code)}"
        else:
            name = f"{function.__qualname__}:{code.co_firstlineno}"
            text = self._located(name, function, code.co_filename)
        if kind == "user":
            text = f"{text} {code_digest(code)}"
        held = [content_of(cell) for cell in function.__closure__ or ()]
        given = (*held, function.__defaults__, function.__kwdefaults__)
        return self.all(text, given) if any(each is not None for each in given) else text

    def _located(self, name: str, value: object, file: str = "") -> str:
        """Return the name of code, with the origin that determines its version."""
        origin, file = origin_of(value), file or _file_of(value)
        if origin.kind in ("torch", "python"):
            return f"{origin.kind} {name}"
        if origin.kind == "library":
            return f"{origin.name} {_digest_of_file(file)} {name}"
        what = f"is {qualified_name(value)} of {file or 'no file'}"
        refused = self.refuse(f"{what}, which no installed distribution has", value)
        return refused or f"{_digest_of_file(file)} {name}"

    def other(self, value: object) -> str:
        import torch

        kind = type(value)
        text = self.code(kind)
        if not self._strict:
            return text
        state = getattr(value, "__dict__", None)
        is_tensor = isinstance(value, (torch.Tensor, torch.nn.Module))
        if origin_of(kind).kind == "torch" and not is_tensor:
            # Only attributes that a program may have set: others are state.
            code = FunctionType, types.MethodType, partial
            items = (state or {}).items()
            kept = {n: v for n, v in items if isinstance(v, code) or _is_constant(v, 0)}
            if kind is internals.fake_mode.get():  # a process that hits traces less
                kept = {n: v for n, v in kept.items() if n not in internals.STATE_OF_FAKE_MODE}
            return text if state is None else self.all(text, [kept])
        if state is None or kind.__module__ == "unittest.mock" or is_tensor:
            return super().other(value)
        return self.all(text, [state])

    def refuse(self, message: str, value: object) -> str:
        return super().refuse(message, value) if self._strict else ""


def _is_constant(value: object, depth: int) -> bool:
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return depth < Describer.max_depth and all(_is_constant(item, depth + 1) for item in items)
    return isinstance(value, (*PLAIN, enum.Enum)) or internals.is_dtype(value)


def _uuid_of(value: object) -> object:
    """Return the ``uuid()`` of an object, such as a pass for torch; ``None`` if it has none."""
    if isinstance(value, type) or not isinstance(getattr(type(value), "uuid", 0), FunctionType):
        return None
    found = value.uuid()  # type: ignore[attr-defined]
    return found if found and isinstance(found, (str, bytes, int, tuple)) else None


def _file_of(value: object) -> str:
    name = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None)
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return file if isinstance(file, str) else ""


@functools.lru_cache(maxsize=4096)
def _digest_of_file(path: str) -> str:
    """Return the digest of a file, or ``""``; read it once, like Python does."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:32]
    return ""


# -- text of code and constants, equal in every process


def code_digest(code: types.CodeType) -> str:
    """Return a digest of compiled code without its location and the names of its variables.

    Names of arguments are included, because callers may use them.
    """
    words: list[object] = [
        code.co_code.hex(),
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount],
        code.co_flags,
        len(code.co_varnames),
        getattr(code, "co_exceptiontable", b"").hex(),
        code.co_names,
        [constant_text(constant) for constant in code.co_consts],
    ]
    return hashlib.sha256(repr(words).encode(errors="surrogatepass")).hexdigest()[:32]


def constant_text(value: object) -> str:
    """Return the text of a constant; the order of a set differs by process."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(constant_text, value))}"
    if type(value) in (tuple, list):
        return f"{type(value).__name__} {list(map(constant_text, cast('list[object]', value)))}"
    if type(value) is dict:
        return f"dict {[*map(constant_text, value.items())]}"
    return f"{type(value).__name__} {value!r}"


def code_fingerprint(code: types.CodeType) -> str:
    """Return a digest of compiled Python code, including its name and names of variables."""
    names = (code.co_name, *code.co_varnames, *code.co_freevars)
    return hashlib.sha256(repr((names, code_digest(code))).encode()).hexdigest()[:32]


# -- namespaces of torch


def digest_of(inside: Mapping[object, object]) -> str:
    """Return a digest of names with their constants, functions and classes."""
    kept = {
        name: value
        for name, value in inside.items()
        if is_code(value) or not str(name).startswith("__")  # some docstrings contain addresses
        if not isinstance(value, types.ModuleType)  # each import adds its own to its package
    }
    text = _NameDescriber().of(kept)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


class _NameDescriber(Describer):
    """Describes code by its name and defaults, without addresses or paths of this machine."""

    max_depth = _s3cache_process.MAX_DEPTH + 2

    def plain(self, value: object) -> str:
        if not isinstance(value, str):
            return str(value)
        value = value.replace(internals.torch_directory()[:-1], "<torch>")
        return repr(value.replace(tempfile.gettempdir(), "<tmp>"))

    def special(self, value: object) -> str | None:
        if is_plain(value):
            return str(value)
        if type(value) is internals.ordered_set.get():
            return self.of(set(internals.inside_of_ordered_set(value)))
        if type(value) is not dict:
            return None
        # torch makes some tables from sets, and FX names functions to wrap by address.
        pairs = [
            pair
            for pair in value.items()
            if type(pair[0]) is not tuple or id(pair[1]) not in pair[0]
        ]
        return f"dict {sorted(self.all('', pair) for pair in pairs)}"

    def code(self, value: object) -> str:
        if isinstance(value, types.ModuleType):
            return self.other(value)
        text = qualified_name(value)
        if isinstance(value, FunctionType):
            return f"{text} {self.of(value.__defaults__)} {self.of(value.__kwdefaults__)}"
        return text

    def other(self, value: object) -> str:
        return type(value).__qualname__

    def refuse(self, message: str, value: object) -> str:
        return "..."


# -- components of keys

# Values and parts are for people and not in digests, so they may be shortened. Entries store them.
_VALUE_CHARACTERS = 200
_ALL_CHARACTERS = 128 << 10
_PARTS = 1024


@dataclass(frozen=True, slots=True)
class Component:
    """One named component of a key.

    Attributes:
        digest: 32 hexadecimal digits.
        value: the content for people; shortened, and not part of the key.
        parts: its parts by name, if the value does not show them; not part of the key either.
    """

    digest: str
    value: str
    parts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        content: str,
        value: str | None = None,
        parts: Iterable[tuple[str, str]] = (),
        characters: int = 1 << 10,
    ) -> Component:
        """Return a component with ``content``, shown as ``value`` and ``parts``, or as itself.

        It has as many parts as fit an entry, truncated to ``characters`` each.
        """
        if value is None:
            value, characters = content, 16 << 10
            parts = [("", content)] if len(content) > _VALUE_CHARACTERS else ()
        if len(value) > _VALUE_CHARACTERS:
            value = value[:_VALUE_CHARACTERS] + "…"
        kept: dict[str, str] = {}
        left = _ALL_CHARACTERS
        for name, part in parts:
            if len(kept) == _PARTS or left <= 0:
                break
            kept[name] = part if len(part) <= characters else part[:characters] + "…"
            left -= len(part)
        digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:32]
        return cls(digest, value, kept)


# -- nodes of graphs


def graph_modules(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Yield ``gm`` and all graph modules inside it, with their names; that of ``gm`` is ``""``."""
    from torch.fx import GraphModule

    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            yield name, module


def call_nodes(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of ``gm``, and of all graphs inside it, that call a function."""
    for _, module in graph_modules(gm):
        yield from (node for node in module.graph.nodes if node.op == "call_function")


# -- functions in graphs of compiled autograd
#
# Compiled autograd traces a whole backward pass. It puts functions into the graph that it creates
# meanwhile: one for each kind of torch's autograd nodes, and one for each compiled graph with a
# backward in this one. They cannot be imported, and torch's key refuses them.

_KNOWN_GLOBALS = {"torch", internals.PROLOGUE_CALLS, internals.PROLOGUE_TANGENTS}


def autograd_function_text(target: object) -> str | None:
    """Return a text that describes such a function completely, or None."""
    if isinstance(target, internals.autograd_node.get()):
        # The state of torch's own nodes is in the arguments. C++ nodes of others may have more.
        return None if target.is_custom_function else f"autograd node {target.__name__}"
    if isinstance(target, FunctionType) and target.__qualname__ == internals.PROLOGUE:
        return _prologue_text(target)
    return None


def _prologue_text(target: FunctionType) -> str | None:
    """Describe code that AOTAutograd generates to check the inputs of a backward pass."""
    cells: Mapping[str, object] = dict(
        zip(target.__code__.co_freevars, target.__closure__ or (), strict=True)
    )
    prologue = getattr(cells.get(internals.PROLOGUE_CELL), "cell_contents", None)
    if not isinstance(prologue, FunctionType) or prologue.__closure__:
        return None
    used = {name for name in _names_in(prologue.__code__) if name in prologue.__globals__}
    tangents = prologue.__globals__.get(internals.PROLOGUE_TANGENTS, ())
    plain = internals.plain_tensor_meta.get()
    if used - _KNOWN_GLOBALS - {*internals.PROLOGUE_MESSAGES} or any(
        type(tangent) is not plain for tangent in tangents
    ):
        return None  # of a tensor subclass, or of an unknown torch
    return f"backward prologue {code_digest(prologue.__code__)} of {list(tangents)!r}"


def _names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
