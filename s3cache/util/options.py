"""Read options from code, a URL or the environment, in one way for settings and stores.

A dataclass declares its fields with :func:`option`. Text, from a URL or the environment, is parsed
as the field's :class:`Kind` has it; a value from code must be of that kind's types and in the same
range. What cannot be used is a :class:`~s3cache.errors.ConfigError` that names the option, the
cause and the fix, and that never repeats what may be a secret.
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

#: What the names of our environment variables begin with.
PREFIX = "S3CACHE_"


@dataclass(frozen=True, slots=True)
class Kind:
    """What an option can be.

    Attributes:
        parse: returns the value of a text; raises ``ValueError`` with the problem and the fix, as
            one phrase each.
        types: what code may give instead of text. Numbers are held to the range that text is.
    """

    parse: Callable[[str], Any]
    types: tuple[type, ...]


def option(default: Any = MISSING, kind: Kind | None = None, *, secret: bool = False) -> Any:
    """Declare a field of a dataclass that calls :func:`check` in its ``__post_init__``.

    ``default`` may be a function that makes it. Any text is fine without a ``kind``. What is
    ``secret`` is never shown in a ``repr``.
    """
    given = {"default_factory" if callable(default) else "default": default}
    return field(**given, repr=not secret, metadata={"kind": kind or TEXT})


@cache
def kinds(of: type) -> Mapping[str, Kind]:
    """Return the options that a dataclass has, by name."""
    return {each.name: each.metadata["kind"] for each in fields(of) if "kind" in each.metadata}


def check(options: Any) -> None:
    """Parse what is still text in a dataclass of options, and refuse what cannot be used.

    ``None`` is fine where it is the default.

    Raises:
        ConfigError: a value cannot be used.
    """
    for declared in fields(options):
        value = getattr(options, declared.name)
        kind: Kind | None = declared.metadata.get("kind")
        if kind is not None and (value is not None or declared.default is not None):
            read = _read(f"option {declared.name}", kind, value)
            object.__setattr__(options, declared.name, read)


def from_environment(of: type, *, but: Iterable[str] = ()) -> dict[str, Any]:
    """Return what environment variables say of the options of ``of``; an empty one says nothing.

    Options named in ``but`` are known already. A value that cannot be used is a ``ConfigError``.
    """
    options = {}
    for name, kind in kinds(of).items():
        variable = PREFIX + name.upper()
        if name not in but and (text := os.environ.get(variable)):
            options[name] = _parse(f"environment variable {variable}", kind, text)
    return options


def check_names(given: Iterable[str], known: Iterable[str], of: str = "") -> None:
    """Raise :class:`ConfigError` for a name of an option of ``of`` that is not ``known``."""
    names = sorted(known)
    for name in given:
        if name not in names:
            fix = f"use one of {', '.join(names)}" if names else "it takes no options"
            thing = f"option {name} of {of}" if of else f"option {name}"
            raise ConfigError(thing, "is not known", did_you_mean(name, names, fix))


def did_you_mean(word: str, known: Iterable[str], otherwise: str, *, prefix: str = "") -> str:
    """Ask whether ``prefix`` and one of ``known`` are meant, if ``word`` is near it."""
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
        if may_be_a_key(text):  # which was meant for another option
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
    """Return the kind of true or false, or of a word that says how."""

    def parse(text: str) -> bool | str:
        if word and text == word:
            return text
        if text.lower() not in _FLAGS:
            fix = f"use true or false, or {word}" if word else "use true or false"
            raise ValueError(f"{text!r} is no truth value", fix)
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
            raise ValueError(f"{text!r} is no {what}", f"give one, e.g. {example}")
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


#: Anything.
TEXT = Kind(str, (str,))
#: True or false.
FLAG = flag_or()
#: The bytes of a key, as base64 where it is text.
KEY = Kind(_base64, (bytes,))
