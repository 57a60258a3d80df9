"""Read options from code, a URL or the environment, in the same way for settings and stores.

A dataclass declares its fields with :func:`option`. The field's :class:`Kind` parses text from a
URL or the environment. A value from code must have one of the kind's types and be in the same
range. An unusable value is a :class:`~s3cache.errors.ConfigError` with the option, the cause and
the fix, which never repeats a possible secret.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any

from s3cache.errors import ConfigError
from s3cache.util.text import may_be_a_key

#: The prefix of our environment variables.
PREFIX = "S3CACHE_"
#: Set if the device of a process computes nothing: its values and times then mean nothing.
INERT_DEVICE = f"{PREFIX}INERT_DEVICE"


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of values that an option accepts.

    Attributes:
        parse: parses text; raises ``ValueError`` with the problem and the fix, as one phrase each.
        types: the types of values from code. Numbers have the same range as text.
        is_path: whether a path from code may also be an ``os.PathLike``.
    """

    parse: Callable[[str], Any]
    types: tuple[type, ...]
    is_path: bool = False


def option(default: Any = MISSING, kind: Kind | None = None, *, secret: bool = False) -> Any:
    """Declare a field of a dataclass that calls :func:`check` in its ``__post_init__``.

    ``default`` may be a function that returns it. Without a ``kind``, any text is accepted. A
    ``secret`` option is never shown in a ``repr``.
    """
    given = {"default_factory" if callable(default) else "default": default}
    return field(**given, repr=not secret, metadata={"kind": kind or TEXT})


@cache
def kinds(of: type) -> Mapping[str, Kind]:
    """Return the options of a dataclass, by name."""
    return {each.name: each.metadata["kind"] for each in fields(of) if "kind" in each.metadata}


def check(options: Any) -> None:
    """Parse text values in a dataclass of options; raise ConfigError for unusable values.

    ``None`` is accepted if it is the default.
    """
    for declared in fields(options):
        value = getattr(options, declared.name)
        kind: Kind | None = declared.metadata.get("kind")
        if kind is not None and (value is not None or declared.default is not None):
            read = _read(f"option {declared.name}", kind, value)
            object.__setattr__(options, declared.name, read)


def from_environment(of: type, *, but: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of ``of`` that non-empty environment variables set, except ``but``.

    Raises ConfigError for an unusable value.
    """
    options = {}
    for name, kind in kinds(of).items():
        variable = PREFIX + name.upper()
        if name not in but and (text := os.environ.get(variable)):
            options[name] = _parse(f"environment variable {variable}", kind, text)
    return options


def check_names(requested: Iterable[str], allowed: Iterable[str], of: str = "") -> None:
    """Raise :class:`ConfigError` for a name that is not an ``allowed`` option of ``of``."""
    names = sorted(allowed)
    for name in requested:
        if name not in names:
            fix = f"use one of {', '.join(names)}" if names else "it takes no options"
            thing = f"option {name} of {of}" if of else f"option {name}"
            raise ConfigError(thing, "is not known", did_you_mean(name, names, fix))


def did_you_mean(word: str, known: Iterable[str], otherwise: str, *, prefix: str = "") -> str:
    """Suggest ``prefix`` with one of ``known`` if ``word`` is similar; else ``otherwise``."""
    spelled = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), list(spelled), n=1)
    return f"did you mean {prefix + spelled[close[0]]!r}?" if close else otherwise


def _read(thing: str, kind: Kind, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return _parse(thing, kind, value)
    # bool is an int to Python.
    if not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
        expected = " or ".join(type_.__name__ for type_ in (*kind.types, str))
        raise ConfigError(thing, f"is a {type(value).__name__}", f"give {expected}")
    if isinstance(value, (int, float)):
        _parse(thing, kind, f"{value:f}" if isinstance(value, float) else str(value))
    return value


def _parse(thing: str, kind: Kind, text: str) -> Any:
    try:
        return kind.parse(text)
    except ValueError as error:
        cause, fix = error.args
        if may_be_a_key(text):  # it was meant for another option
            cause = cause.replace(repr(text), "what it is set to")
        raise ConfigError(thing, cause, fix) from None


# -- kinds


def choice(*choices: str) -> Kind:
    """One of a few words."""

    def parse(text: str) -> str:
        if text in choices:
            return text
        fix = did_you_mean(text, choices, f"use one of {', '.join(choices)}")
        raise ValueError(f"{text!r} is not known", fix)

    return Kind(parse, (str,))


def flag_or(word: str = "") -> Kind:
    """Return the kind of true or false, or of one other word."""

    def parse(text: str) -> bool | str:
        if word and text == word:
            return text
        if text.lower() not in _FLAGS:
            fix = f"use true or false, or {word}" if word else "use true or false"
            raise ValueError(f"{text!r} is not a truth value", fix)
        return _FLAGS[text.lower()]

    return Kind(parse, (bool,))


def count(at_most: int | None = None) -> Kind:
    """Return the kind of a whole number of 1 or more."""
    return Kind(_number(r"\d{1,18}", int, "whole number", "10", 1, at_most), (int,))


def seconds(at_least: float = 0, at_most: float | None = None) -> Kind:
    """Return the kind of a time in seconds, such as ``10`` or ``0.5``."""
    parse = _number(r"\d{1,9}(\.\d+)?", float, "number of seconds", "10 or 0.5", at_least, at_most)
    return Kind(parse, (int, float))


def size(at_least: int = 1, at_most: int | None = None) -> Kind:
    """Return the kind of a number of bytes, such as ``12345``, ``500MB`` or ``10GiB``."""

    def read(text: str) -> int:
        digits = re.match(r"\d+", text)[0]  # type: ignore[index]
        unit = text[len(digits) :].strip().upper().removesuffix("B")
        base = 1024 if unit.endswith("I") else 1000
        factor: int = base ** " KMGT".index(unit[:1] or " ")
        return int(digits) * factor

    pattern = r"(?i)\d{1,15} ?([KMGT]i?)?B?"
    return Kind(_number(pattern, read, "size", "500MB or 10GiB", at_least, at_most), (int,))


def _number(
    pattern: str,
    read: Callable[[str], float],
    what: str,
    example: str,
    at_least: float,
    at_most: float | None,
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not a {what}", f"give one, e.g. {example}")
        number = read(text)
        if number < at_least or (at_most is not None and number > at_most):
            range_ = f"{at_least} or more" if at_most is None else f"{at_least} to {at_most}"
            raise ValueError(f"{number} is out of range", f"give {range_}")
        return number

    return parse


_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("is not base64", "make one: openssl rand -base64 32") from None


#: Any text.
TEXT = Kind(str, (str,))
#: The path of a file or directory.
PATH = Kind(str, (str,), is_path=True)
#: True or false.
FLAG = flag_or()
#: The bytes of a key; base64 in text.
KEY = Kind(_base64, (bytes,))
