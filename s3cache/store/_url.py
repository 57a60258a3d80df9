"""Stores by URL.

::

    s3://bucket/prefix?endpoint_url=https://minio:9000&region=eu-west-1&sse=aws:kms
    file:///absolute/directory?create=false
    memory://name

An option comes, in this order, from an argument, the URL, the environment variable
``S3CACHE_<OPTION>`` (S3 only), botocore's own configuration. Credentials are refused in URLs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from os import environ
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from s3cache.errors import ConfigError
from s3cache.store._base import Store
from s3cache.store._s3_options import SECRET_OPTIONS, S3Options

__all__ = [
    "FileLocation",
    "Location",
    "MemoryLocation",
    "open_store",
    "parse_url",
    "store_identity",
]

_SCHEMES = ("s3", "file", "memory")
_ENVIRONMENT_PREFIX = "S3CACHE_"
# What other tools call them, so that a credential under a foreign name is refused as one too.
_LOOKS_SECRET = ("secret", "password", "passwd", "token", "access_key", "accesskey", "credential")


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A directory: ``file:///absolute/path``."""

    path: str
    create: bool = True

    @property
    def identity(self) -> str:
        """The directory as a canonical URL."""
        return f"file://{quote(self.path)}"


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A store in this process, one to a name: ``memory://name``."""

    name: str

    @property
    def identity(self) -> str:
        """The name as a canonical URL."""
        return f"memory://{quote(self.name)}"


Location: TypeAlias = "S3Options | FileLocation | MemoryLocation"

_memory_stores: dict[str, Store] = {}


def open_store(url: str, **options: Any) -> Store:
    """The store at ``url``; nothing is sent or opened yet, and botocore is not imported.

    Two ``memory://`` URLs of one name are one store.

    Raises:
        ConfigError: the URL or an option cannot be used; see :func:`parse_url`.
    """
    location = parse_url(url, **options)
    if isinstance(location, S3Options):
        from s3cache.store._s3 import S3Store

        return S3Store(location)
    if isinstance(location, FileLocation):
        from s3cache.store._local import LocalStore

        return LocalStore(location.path, create=location.create)
    from s3cache.store._memory import MemoryStore

    return _memory_stores.setdefault(location.name, MemoryStore(location.name))


def store_identity(url: str, **options: Any) -> str:
    """A canonical name of where the bytes of ``url`` are; see :attr:`S3Options.identity`."""
    return parse_url(url, **options).identity


def parse_url(url: str, **options: Any) -> Location:
    """What ``url``, ``options`` and the environment say, typed and checked.

    ``options`` win over the URL, the URL over the environment; one that is ``None`` says nothing.

    Raises:
        ConfigError: unknown scheme, option or value; a credential in the URL; no bucket or path.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme == "s3" else None
    except ValueError as error:
        raise ConfigError("store URL", f"cannot be read ({error})", _EXAMPLES) from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"store URL scheme {parts.scheme!r}",
            "is not known",
            _did_you_mean(parts.scheme, _SCHEMES) or _EXAMPLES,
        )
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc:
        raise ConfigError(f"store URL {shown}", "holds a user name or password", _NO_CREDENTIALS)
    if parts.fragment:
        raise ConfigError(f"store URL {shown}", "holds a '#'", "write it as %23")
    given = {**_query(parts, shown), **{k: v for k, v in options.items() if v is not None}}
    if parts.scheme == "s3":
        return _s3(parts, shown, given)
    if parts.scheme == "file":
        return _file(parts, shown, given)
    return _memory(parts, shown, given)


_EXAMPLES = "use s3://bucket/prefix, file:///directory or memory://name"
_NO_CREDENTIALS = (
    "take it out; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or profile=..., "
    "or pass access_key= and secret_key= in code"
)


def _s3(parts: SplitResult, shown: str, given: dict[str, Any]) -> S3Options:
    if not parts.netloc:
        raise ConfigError(f"store URL {shown}", "names no bucket", "use s3://bucket/prefix")
    if parts.path.rstrip("/") != parts.path.rstrip("/").replace("//", "/"):
        raise ConfigError(f"store URL {shown}", "has an empty path segment", "write one '/'")
    names = tuple(_types(S3Options).keys() - {"bucket", "prefix"})
    _check_names(given, names, shown)
    for name in names:
        variable = _ENVIRONMENT_PREFIX + name.upper()
        if name not in given and (text := environ.get(variable)):
            given[name] = _typed(S3Options, name, text, f"environment variable {variable}")
    return S3Options(
        bucket=unquote(parts.netloc),
        prefix=unquote(parts.path).strip("/"),
        **{name: _typed(S3Options, name, value, f"option {name}") for name, value in given.items()},
    )


def _file(parts: SplitResult, shown: str, given: dict[str, Any]) -> FileLocation:
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(
            f"store URL {shown}", "names no absolute path", "use three slashes: file:///directory"
        )
    path = unquote(parts.path)
    if "\0" in path:
        raise ConfigError(f"store URL {shown}", "holds a NUL character", "take it out")
    _check_names(given, ("create",), shown)
    create = _typed(FileLocation, "create", given.get("create", True), "option create")
    return FileLocation("/" + path.strip("/"), create)


def _memory(parts: SplitResult, shown: str, given: dict[str, Any]) -> MemoryLocation:
    _check_names(given, (), shown)
    return MemoryLocation(unquote(parts.netloc + parts.path).strip("/"))


def _query(parts: SplitResult, shown: str) -> dict[str, str]:
    query: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in SECRET_OPTIONS or any(word in name.lower() for word in _LOOKS_SECRET):
            raise ConfigError(f"store URL {shown}", f"holds the secret {name!r}", _NO_CREDENTIALS)
        if name == "proxy" and "@" in value:
            raise ConfigError(
                f"store URL {shown}",
                "holds a proxy's user name or password",
                f"set the environment variable {_ENVIRONMENT_PREFIX}PROXY instead",
            )
        if name in query:
            raise ConfigError(f"option {name} in {shown}", "is given twice", "leave one out")
        if not value:
            raise ConfigError(f"option {name} in {shown}", "has no value", "give one or drop it")
        query[name] = value
    return query


def _check_names(given: Iterable[str], known: tuple[str, ...], shown: str) -> None:
    for name in given:
        if name not in known:
            fix = _did_you_mean(name, known) or (
                f"known are {', '.join(sorted({*known} - SECRET_OPTIONS))}"
                if known
                else "it takes no options"
            )
            raise ConfigError(f"option {name} of {shown}", "is not known", fix)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    spelled = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), list(spelled), n=1)
    return f"did you mean {spelled[close[0]]!r}?" if close else ""


@cache
def _types(of: type) -> Mapping[str, Any]:
    hints = get_type_hints(of)
    return {each.name: hints[each.name] for each in fields(of)}


def _typed(of: type, name: str, value: Any, thing: str) -> Any:
    """``value`` (text from a URL or the environment, or an argument) as ``of``'s field has it."""
    hint = _types(of)[name]
    if get_origin(hint) is not Literal:
        optional = [each for each in get_args(hint) if each is not NoneType]
        hint = optional[0] if optional else hint
    if get_origin(hint) is Literal:
        return _choice(value, get_args(hint), thing)
    if hint is bool and isinstance(value, str):
        return _boolean(value, thing)
    if hint is bytes and isinstance(value, str):
        return _base64(value, thing)
    try:
        if hint in (int, float) and isinstance(value, str):
            return hint(value)
    except ValueError:
        kind = "whole number" if hint is int else "number"
        raise ConfigError(thing, f"{value!r} is no {kind}", "give one, e.g. 10") from None
    if not isinstance(value, (int, float) if hint is float else hint):
        # no repr of the value: it may be a secret
        raise ConfigError(thing, f"is a {type(value).__name__}", f"give a {hint.__name__}")
    return value


def _choice(value: Any, choices: tuple[str, ...], thing: str) -> str:
    if value in choices:
        return str(value)
    fix = _did_you_mean(str(value), choices) or f"use one of {', '.join(choices)}"
    raise ConfigError(thing, f"{value!r} is not known", fix)


def _boolean(text: str, thing: str) -> bool:
    try:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
            text.lower()
        ]
    except KeyError:
        raise ConfigError(thing, f"{text!r} is no truth value", "use true or false") from None


def _base64(text: str, thing: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(thing, "is not base64", "make one: openssl rand -base64 32") from None
