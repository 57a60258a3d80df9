"""Ask the questions again that Dynamo asked the process while it traced a frame.

Dynamo folds some answers into traced code, without a guard: whether a module has an attribute or a
dictionary a key, whether a class is registered with an abstract one, the constants in ``builtins``,
and the results of functions such as ``torch.distributed.is_initialized``. A question is plain data:
its kind, and its objects by name or source. A frame with a question that cannot be asked again is
refused.
"""

from __future__ import annotations

import abc
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]

from s3cache.features.recall import dynamo, names
from s3cache.features.recall.content import plain_content
from s3cache.features.recall.sources import (
    Plain,
    RefusedError,
    Source,
    Sources,
    is_imported,
    name_in_types,
)
from s3cache.graph import (
    PLAIN_KINDS,
    Component,
    operators_with_others_rules,
    subclass_text,
    value_at,
)

#: An object that only has a source; and an answer that Dynamo did not keep as a constant.
_AT_SOURCE: Final = object()
UNKNOWN: Final = object()
#: The result of a function of Dynamo that raises an error.
RAISED: Final = object()


class Question(NamedTuple):
    """A question that Dynamo asked: its kind, objects with their sources if any, and the answer."""

    kind: str
    about: tuple[tuple[object, Source | None], ...]
    answer: object = UNKNOWN


# These yield the questions in a call of a function of Dynamo, with its result and arguments.


def of_attribute(_: object, module: Any, tx: object, name: str) -> Iterator[Question]:
    """Ask whether a module, as a variable of Dynamo, has an attribute."""
    yield Question("attribute", ((module.value, module.source), (name, None)))


def of_other_attribute(_: object, module: Any, tx: object, name: str) -> Iterator[Question]:
    """Ask the same, but not for what torch and Python have: their versions are in the key."""
    top = module.value.__name__.partition(".")[0]
    is_known = top == "torch" or top in sys.stdlib_module_names
    if not (is_known and hasattr(module.value, name)):
        yield from of_attribute(_, module, tx, name)


def of_builtin(_: object, trace: Any, argval: str) -> Iterator[Question]:
    """Ask for a constant in ``builtins``; functions have sources."""
    if not callable(trace.f_builtins.get(argval)):
        yield Question("builtin", ((argval, None),))


def of_key(result: object, table: Any, tx: object, arg: Any) -> Iterator[Question]:
    """Ask whether a dictionary has a key that Dynamo did not find.

    Dynamo guards a key that it found, and one of which it asked whether it is there.
    """
    key = arg.as_python_constant() if arg.is_python_constant() else None
    if result is RAISED and table.source is not None and type(key) is str:
        yield Question("key", ((_AT_SOURCE, table.source), (key, None)))


def of_classes(
    result: object, variable: Any, tx: object, value: Any, kinds: Any
) -> Iterator[Question]:
    """Ask ``isinstance`` or ``issubclass`` about classes with a registry.

    The answers for other classes follow from their bases.
    """
    for base in () if result is RAISED else _classes_in(kinds.as_python_constant()):
        if isinstance(base, abc.ABCMeta):
            is_class = variable.fn is issubclass
            kind = value.as_python_constant() if is_class else value.python_type()
            if getattr(base, "_is_protocol", False) and base not in kind.__mro__:
                raise RefusedError("object", f"asks an object for the members of {base!r}")
            yield Question("subclass", ((kind, value.source), (base, kinds.source)))


def _classes_in(kinds: object) -> Iterator[object]:
    if isinstance(kinds, tuple):
        for each in kinds:
            yield from _classes_in(each)
    elif isinstance(kinds, types.UnionType):
        yield from _classes_in(typing.get_args(kinds))
    else:
        yield typing.get_origin(kinds) or kinds  # such as ``typing.Mapping``


def of_call(
    result: Any, variable: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Question]:
    """Call a function again that Dynamo has folded, unless its arguments decide."""
    if result is RAISED or tx.f_code is inspect.unwrap.__code__:  # which only bounds its loop
        return
    is_kept = result.is_python_constant()
    function, arguments = variable.as_python_constant(), [*args, *kwargs.values()]
    is_folded = is_kept or getattr(variable, "can_constant_fold_through", lambda: True)()
    is_pure = (
        inspect.ismethoddescriptor(function)
        or getattr(function, "__module__", "") in _PURE
        or (inspect.isbuiltin(function) and bool(arguments) and function not in names.folded.get())
    )
    if is_folded and not is_pure and all(each.is_python_constant() for each in arguments):
        values = [(each.as_python_constant(), None) for each in arguments]
        about = ((function, variable.source), (tuple(kwargs), None), *values)
        yield Question("call", about, result.as_python_constant() if is_kept else UNKNOWN)


def of_set(result: Any, *_: object, **__: object) -> Iterator[Question]:
    """Refuse a set that a method makes, if the order of its elements has a seed."""
    constant = None if result is RAISED else result.as_python_constant()
    values = list(constant) if isinstance(constant, (set, frozenset)) else []
    if len(values) > 1 and not all(isinstance(each, (int, float, complex)) for each in values):
        raise RefusedError("object", f"makes {constant!r}, and the order of a set varies")
    yield from ()


def of_identity(result: Any, tx: object, values: Any, _: object) -> Iterator[Question]:
    """Refuse to compare the identity of equal constants, which Python may share or not."""
    left, right = values
    is_same = left is right or (left.source is not None and left.source == right.source)
    if (
        result is not RAISED
        and not is_same
        and left.is_python_constant()
        and right.is_python_constant()
    ):
        value, other = left.as_python_constant(), right.as_python_constant()
        is_shared = type(value) in _SHARED and type(value) is type(other) and value == other
        if is_shared and not (type(value) is int and -5 <= value <= 256):
            raise RefusedError("object", f"asks whether {value!r} is another one")
    yield from ()


def of_text(result: object, variable: Any, tx: object, value: Any) -> Iterator[Question]:
    """Ask for the ``str`` of an object without its own ``__str__``.

    Dynamo then runs the object's ``__repr__``, which may read anything.
    """
    is_text = result is not None and result is not RAISED
    if is_text and not value.is_python_constant() and hasattr(value, "value"):
        there: Any = value.value
        if getattr(type(there), "__str__", None) is object.__str__:
            yield Question("call", ((str, None), ((), None), (there, value.source)))


#: The functions of Dynamo in which it may fold an answer of the process.
ASKING: Final[tuple[tuple[Any, Callable[..., Iterator[Question]]], ...]] = (
    *((each, of_classes) for each in (names.is_instance, names.is_subclass)),
    *((each, of_call) for each in (names.call_torch, names.call_skipped, names.call_polyfilled)),
    *((each, of_set) for each in names.set_methods),
    (names.text_of, of_text),
    (names.has_attribute, of_attribute),
    (names.attribute_of_module, of_other_attribute),
    (names.attribute_of_module_now, of_other_attribute),
    (names.subscript, of_key),
    (names.load_builtin, of_builtin),
)
#: Types of constants, of which equal ones may be one object.
_SHARED: Final = frozenset({int, float, complex, str, bytes, tuple, frozenset})
#: Modules of Python with functions that only depend on their arguments.
_PURE: Final = frozenset({"re", "math"})
#: Functions with an answer that the frame itself may change: the key of the frame has their state.
#: Or the answer is true in each trace.
_OF_STATE: Final = re.compile(r"\w*(autocast|dtype|layer_stack|is_(dynamo_)?compiling)\w*")


# -- plain data


def question_rows(
    asked: Sequence[Question], sources: Sources, builtins: Mapping[str, object]
) -> list[Plain]:
    """Return the questions as plain data with their answers, each once.

    Raises:
        RefusedError: a question cannot be asked again, or has another answer by now.
    """
    rows: dict[bytes, Plain] = {}
    for kind, about, traced in asked:
        row = [kind, [_written(*each, sources) for each in about]]
        answer = answer_to(row, sources, builtins)
        if traced is not UNKNOWN and _text(traced) != answer:
            if _OF_STATE.fullmatch(str(getattr(about[0][0], "__name__", ""))):
                continue
            raise RefusedError("object", f"asks {_said(row)}, which has another answer now")
        rows[msgpack.packb([*row, answer])] = [*row, answer]
    return [*rows.values()]


def changed(rows: Sequence[Plain], sources: Sources, builtins: Mapping[str, object]) -> str:
    """Return the first question with another answer, in words; ``""`` if there is none."""
    for *row, answer in rows:
        if answer_to(row, sources, builtins) != answer:
            return _said(row)
    return ""


def _said(row: Plain) -> str:
    kind, about = row
    values = [str(value) for _, *rest in about for value in rest if value != ["tuple", []]]
    return f"{kind} {' '.join(values)}"


def answer_to(row: Plain, sources: Sources, builtins: Mapping[str, object]) -> str:
    """Return the answer to a question as text; an error is an answer."""
    kind, about = row
    values = [_read(each, sources) for each in about]
    try:
        answer = _ASK[kind](builtins, *values)
    except Exception as exc:  # noqa: BLE001 - whatever the program raises
        return f"raises {type(exc).__qualname__}"
    return _text(answer)


def _called(_: object, function: Any, keywords: tuple[str, ...], *values: object) -> object:
    count = len(values) - len(keywords)
    return function(*values[:count], **dict(zip(keywords, values[count:], strict=True)))


def _sharding(_: object) -> str:
    kind = names.distributed_tensor.get()
    return f"{subclass_text(kind)} {operators_with_others_rules(kind)}"


def is_of_distributed(component: Component) -> bool:
    """Return whether only torch's own distributed tensors take part in a graph.

    :data:`SHARDING` has what the component says of them.
    """
    if names.DISTRIBUTED not in sys.modules:
        return False
    return component.digest == Component.of(subclass_text(names.distributed_tensor.get())).digest


#: Asks how operators on distributed tensors are sharded.
SHARDING: Final = Question("sharding", ())
_ABSENT: Final = "s3cache: absent"
_ASK: Final[Mapping[str, Callable[..., object]]] = {
    "attribute": lambda _, module, name: hasattr(module, name),
    "key": lambda _, table, key: dict.__contains__(table, key),
    "subclass": lambda _, kind, base: issubclass(kind, base),
    "builtin": lambda builtins, name: builtins.get(name, _ABSENT),
    "call": _called,
    "sharding": _sharding,
}


def _text(answer: object) -> str:
    row = dynamo.constant_row(answer)
    return f"constant {row}" if row is not None else plain_content(answer)


def _written(value: Any, source: Source | None, sources: Sources) -> Plain:
    """Return an object of a question as plain data; raise RefusedError if no source leads to it."""
    if value is _AT_SOURCE:
        return ["at", sources.number(source)]
    if (row := dynamo.constant_row(value)) is not None:
        return ["constant", row]
    if type(value) in PLAIN_KINDS or type(value) is tuple:
        return ["plain", sources.plain(value)]
    if type(value) is dict and all(type(key) is str for key in value):
        named = [[key, _written(item, None, sources)] for key, item in value.items()]
        return ["dict", named]
    if isinstance(value, types.ModuleType) and is_imported(value):
        return ["module", value.__name__]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(module, str) and value_at(module, name) is value:
        return ["named", module, name]
    if module == "builtins" and (alias := name_in_types(value)):  # such as that of generators
        return ["named", types.__name__, alias]
    if callable(value) and value in names.folded.get():
        alike = [each for each in names.folded.get() if _folded_name(each) == _folded_name(value)]
        if len(alike) == 1:
            return ["folded", _folded_name(value)]
    if source is not None:
        number = sources.number(source)
        if (there := sources.at(number)) is value:
            return ["at", number]
        if type(there) is value:
            return ["type", number]
    raise RefusedError("object", f"asks about {value!r}, which has neither a name nor a source")


def _folded_name(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}.{function.__qualname__}"


def _read(plain: Plain, sources: Sources) -> object:
    """Return the object of plain data; raise any error if it is not there any more."""
    kind, *values = plain
    if kind == "constant":
        return dynamo.constant_of(values[0])
    if kind == "plain":
        return sources.argument(values[0])
    if kind == "dict":
        return {key: _read(item, sources) for key, item in values[0]}
    if kind == "module":
        return sys.modules[values[0]]
    if kind == "named":
        if (named := value_at(*values)) is None:
            raise LookupError(values)
        return named
    if kind == "folded":
        return next(each for each in names.folded.get() if _folded_name(each) == values[0])
    value = sources.at(values[0])
    return type(value) if kind == "type" else value
