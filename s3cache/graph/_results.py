"""What the modules of this package return: a component of a key, or a reason against one."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

from s3cache.torch_api import internals

#: Returns the version that the user registered a function, operator, class or module with, if any.
RegisteredVersion: TypeAlias = Callable[[object], "str | None"]

# Digests do not cover what is shown to people, so it may be shortened. An entry stores all of it.
_VALUE_CHARACTERS = 200
_TEXT_CHARACTERS = 16 << 10
_PART_CHARACTERS = 1 << 10
_ALL_CHARACTERS = 128 << 10
_PARTS = 1024


def bounded(parts: Iterable[tuple[str, str]], characters: int = _PART_CHARACTERS) -> dict[str, str]:
    """Return the first of ``parts``, each cut to ``characters``, and no more than fits an entry."""
    kept: dict[str, str] = {}
    left = _ALL_CHARACTERS
    for name, text in parts:
        if len(kept) == _PARTS or left <= 0:
            break
        kept[name] = text if len(text) <= characters else text[:characters] + "…"
        left -= len(text)
    return kept


@dataclass(frozen=True, slots=True)
class Component:
    """One named component of a key.

    Attributes:
        digest: 32 hexadecimal digits.
        value: what it is, for people; shortened, and not part of the key.
        parts: what it consists of, by name, where the value does not say it; neither.
    """

    digest: str
    value: str
    parts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_text(cls, text: str) -> Component:
        """Return a component with ``text`` as its content and value."""
        is_short = len(text) <= _VALUE_CHARACTERS
        parts = None if is_short else bounded((("", text),), _TEXT_CHARACTERS)
        return cls.of_bytes(text.encode(), text, parts)

    @classmethod
    def of_bytes(cls, data: bytes, value: str, parts: Mapping[str, str] | None = None) -> Component:
        """Return a component with ``data`` as its content, shown as ``value`` and ``parts``."""
        if len(value) > _VALUE_CHARACTERS:
            value = value[:_VALUE_CHARACTERS] + "…"
        return cls(hashlib.sha256(data).hexdigest()[:32], value, parts or {})


Code: TypeAlias = Literal[
    "caches-off",  # the process
    "fx-graph-cache-off",
    "freezing",
    "fakify-first-call",
    "constant-folding",
    "bisecting",
    "custom-pass",
    "custom-callable",
    "config",
    "function",  # the graph
    "method",
    "module",
    "higher-order-op",
    "node-kind",
    "checkpoint-context",
    "custom-operator",
    "override",
    "generator",
    "subclass",
    "frozen-parameters",
    "backward-state",  # its inputs
    "input",
    "component",
    "entry",  # what it was compiled to
    "unrecorded",
    "kernel",
    "torch",  # a reason that only torch knows
    "error",  # none at all
]

# Reasons that hold for the FX graphs that a graph is traced into as well.
_BLOCKS_FX_LEVEL: frozenset[Code] = frozenset(
    {
        "caches-off",
        "fx-graph-cache-off",
        "constant-folding",
        "bisecting",
        "custom-pass",
        "config",
        "generator",
        "higher-order-op",
        "input",
        "error",
    }
)


@dataclass(frozen=True, slots=True)
class BypassReason:
    """One reason why a graph cannot be cached.

    Attributes:
        code: the kind of reason, stable over releases.
        message: what is wrong.
        fix: what a user can do about it.
        node: name of the graph's node, or ``""`` for the graph as a whole.
        target: what the node calls, qualified.
        module: the (sub)graph the node is in, ``""`` for the outermost.
        line: of the program, where a report knows it.
    """

    code: Code
    message: str
    fix: str = ""
    node: str = ""
    target: str = ""
    module: str = ""
    line: str = ""

    @property
    def blocks_fx_level(self) -> bool:
        """Whether FX graphs of the graph cannot be cached either, as far as is known."""
        return self.code in _BLOCKS_FX_LEVEL

    def __str__(self) -> str:
        where = self.line or f"{self.module}.{self.node}".strip(".")
        return f"{where}: {self.message}" if where else self.message

    def as_dict(self) -> dict[str, str]:
        """Return all attributes as plain data."""
        return asdict(self)


#: A component, or its text, or nothing to say; or every reason why some code allows no key.
Finding: TypeAlias = "Component | str | list[BypassReason] | None"


def suggested_fix(target: object, condition: str = "if it depends on its inputs alone") -> str:
    """Return the lines of Python that register ``target``, to be pasted; or what to do instead."""
    module = str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", ""))
    if module.startswith(internals.COMPILED_AUTOGRAD):
        return (
            "go backward outside of compiled autograd there: torch makes this function as it "
            "captures the backward pass, so it cannot be registered"
        )
    if module.startswith("torch.") and "<locals>" in name:
        return (
            "call a custom operator or plain functions there instead: torch makes a new function "
            "for each call of what allow_in_graph or nonstrict_trace keeps from it"
        )
    if not module or not name:  # an object
        return suggested_fix(type(target), condition)
    is_found = _value_at(module, name) is target
    if isinstance(target, types.FunctionType) and hasattr(target, "__wrapped__") and not is_found:
        # functools.wraps gave it the names of what it wraps.
        module, name = str(target.__globals__.get("__name__")), target.__code__.co_name
        is_found = _value_at(module, name) is target
    plain = name.rpartition(".")[2]
    plain = plain if plain.isidentifier() else "your_function"
    if module == "__main__":  # no other module can import it from there
        imported, prefix = "import s3cache", ""
    else:
        imported, prefix = f"import s3cache, {module}", f"{module}."
    at = prefix + (name if is_found else plain)
    register = f"{imported}; s3cache.register_cacheable({at}, version='1')  # {condition}"
    return register if is_found else f"define {plain} at the top of {module}, then: {register}"


def _value_at(module: str, name: str) -> object:
    """Return what an imported module has under a qualified name, or None."""
    found: object = sys.modules.get(module)
    for segment in name.split("."):
        found = getattr(found, "__dict__", {}).get(segment)
    return found


def qualified_name(target: object) -> str:
    """Return module and name of a function or class, or of the class of an object."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:  # an object: its type says more than an address would
        target = type(target)
        name = target.__qualname__
    return f"{getattr(target, '__module__', None)}.{name}"
