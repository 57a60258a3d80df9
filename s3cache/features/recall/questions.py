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
from s3cache.features.recall.sources import Plain, RefusedError, Source, Sources, is_imported
from s3cache.graph import PLAIN_KINDS, value_at


class Question(NamedTuple):
    """A question that Dynamo asked: its kind, and objects with their sources, if they have one."""

    kind: str
    about: tuple[tuple[object, Source | None], ...]


#: An object that only has a source.
_AT_SOURCE: Final = object()


def of_attribute(module: Any, name: str) -> Question:
    """Return the question whether a module, as a variable of Dynamo, has an attribute."""
    return Question("attribute", ((module.value, module.source), (name, None)))


def of_builtin(name: str) -> Question:
    """Return the question for a constant in ``builtins``."""
    return Question("builtin", ((name, None),))


def of_key(table: Source, key: str) -> Question:
    """Return the question whether the dictionary at a source has a key."""
    return Question("key", ((_AT_SOURCE, table), (key, None)))


def of_classes(function: object, value: Any, kinds: Any) -> Iterator[Question]:
    """Yield the questions of ``isinstance`` or ``issubclass`` about classes with a registry.

    The answers for other classes follow from their bases. ``value`` and ``kinds`` are the arguments
    as variables of Dynamo.
    """
    for base in _classes_in(kinds.as_python_constant()):
        if isinstance(base, abc.ABCMeta):
            is_class = function is issubclass
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
    variable: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_kept: bool
) -> Question | None:
    """Return the question for a call that Dynamo has folded; None if its arguments decide.

    ``variable`` is the function, as a variable of Dynamo; ``is_kept`` says that the result is a
    constant.
    """
    function, given = variable.as_python_constant(), [*args, *kwargs.values()]
    if not is_kept and not getattr(variable, "can_constant_fold_through", lambda: True)():
        return None
    is_pure = (
        inspect.ismethoddescriptor(function)
        or getattr(function, "__module__", "") in _PURE
        or (inspect.isbuiltin(function) and bool(given) and function not in names.folded.get())
    )
    if is_pure or not all(each.is_python_constant() for each in given):
        return None
    values = [(each.as_python_constant(), None) for each in given]
    return Question("call", ((function, variable.source), (tuple(kwargs), None), *values))


def of_text(variable: Any) -> Question | None:
    """Return the question for ``str`` of an object without its own ``__str__``.

    Dynamo then runs the object's ``__repr__``, which may read anything.
    """
    if variable.is_python_constant() or not hasattr(variable, "value"):
        return None
    value: Any = variable.value
    if getattr(type(value), "__str__", None) is not object.__str__:
        return None
    return Question("call", ((str, None), ((), None), (value, variable.source)))


def is_torchs_or_pythons(module: types.ModuleType) -> bool:
    """Return whether a module is part of torch or of Python, which keys identify."""
    top = module.__name__.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


#: Modules of Python with functions that only depend on their arguments.
_PURE: Final = frozenset({"re", "math"})
#: Functions with an answer that the frame itself may change: the key of the frame has their state.
_OF_STATE: Final = re.compile(r"\w*(autocast|dtype|layer_stack)\w*")


# -- plain data


def question_rows(
    asked: Sequence[tuple[Question, object]], sources: Sources, builtins: Mapping[str, object]
) -> list[Plain]:
    """Return the questions as plain data with their answers, each once.

    ``asked`` has the answer with each question, or ``UNKNOWN``.

    Raises:
        RefusedError: a question cannot be asked again, or has another answer by now.
    """
    rows: dict[bytes, Plain] = {}
    for question, traced in asked:
        row = [question.kind, [_written(*each, sources) for each in question.about]]
        answer = answer_to(row, sources, builtins)
        if traced is not UNKNOWN and _text(traced) != answer:
            if _OF_STATE.fullmatch(_name_of(question.about[0][0])):
                continue
            raise RefusedError("object", f"asks {_said(row)}, which has another answer now")
        rows[msgpack.packb([*row, answer])] = [*row, answer]
    return [*rows.values()]


#: The answer of a question that Dynamo did not keep as a constant.
UNKNOWN: Final = object()


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


_ABSENT: Final = "s3cache: absent"
_ASK: Final[Mapping[str, Callable[..., object]]] = {
    "attribute": lambda _, module, name: hasattr(module, name),
    "key": lambda _, table, key: dict.__contains__(table, key),
    "subclass": lambda _, kind, base: issubclass(kind, base),
    "builtin": lambda builtins, name: builtins.get(name, _ABSENT),
    "call": _called,
}


def _name_of(value: object) -> str:
    return str(getattr(value, "__name__", ""))


def _text(answer: object) -> str:
    row = dynamo.constant_row(answer)
    return f"constant {row}" if row is not None else plain_content(answer)


def _written(value: Any, source: Source | None, sources: Sources) -> Plain:
    """Return an object of a question as plain data.

    Raises:
        RefusedError: it has neither a name nor a source.
    """
    if value is _AT_SOURCE:
        return ["at", sources.number(source)]
    if (row := dynamo.constant_row(value)) is not None:
        return ["constant", row]
    if type(value) in PLAIN_KINDS or type(value) is tuple:
        return ["plain", sources.plain(value)]
    if isinstance(value, types.ModuleType) and is_imported(value):
        return ["module", value.__name__]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(module, str) and value_at(module, name) is value:
        return ["named", module, name]
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
    """Return the object of plain data.

    Raises:
        Exception: it is not there any more.
    """
    kind, *rest = plain
    if kind == "constant":
        return dynamo.constant_of(rest[0])
    if kind == "plain":
        return sources.argument(rest[0])
    if kind == "module":
        return sys.modules[rest[0]]
    if kind == "named":
        if (found := value_at(*rest)) is None:
            raise LookupError(rest)
        return found
    if kind == "folded":
        return next(each for each in names.folded.get() if _folded_name(each) == rest[0])
    value = sources.at(rest[0])
    return type(value) if kind == "type" else value
