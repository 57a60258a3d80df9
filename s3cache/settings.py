"""Every setting and its default.

A setting comes, in this order, from an argument, the environment variable ``S3CACHE_<NAME>``, the
default here. Options of the store (``endpoint_url``, ``region``, ...) are described with it, in
:class:`s3cache.store.S3Options`, and may be given the same three ways or in the URL.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

from s3cache.errors import ConfigError
from s3cache.store._s3_options import S3Options

__all__ = ["Mode", "Settings"]

Mode: TypeAlias = Literal["read-write", "read-only", "write-only", "off"]

_PREFIX = "S3CACHE_"
logger = logging.getLogger("s3cache")


def _text(value: str) -> str:
    return value


def _mode(value: str) -> str:
    if value not in get_args(Mode):
        raise ValueError(f"is not one of {', '.join(get_args(Mode))}")
    return value


def _flag(value: str) -> bool:
    try:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
            value.lower()
        ]
    except KeyError:
        raise ValueError("is neither true nor false") from None


def _count(value: str) -> int:
    number = int(value) if re.fullmatch(r"\d{1,18}", value) else 0
    if number < 1:
        raise ValueError("is not a whole number of 1 or more")
    return number


def _seconds(value: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        raise ValueError("is not a number of seconds such as 10 or 0.5")
    return float(value)


def _more_seconds(value: str) -> float:
    if not (seconds := _seconds(value)):
        raise ValueError("is not more than 0")
    return seconds


def _bytes(value: str) -> int:
    found = re.fullmatch(r"(\d{1,15}) ?(|[KMGT]i?)B?", value, re.IGNORECASE)
    if not found or not int(found[1]):
        raise ValueError("is not a size such as 500MB or 10GiB")
    unit = found[2].upper()
    base = 1024 if unit.endswith("I") else 1000
    return int(int(found[1]) * base ** (" KMGT".index(unit[0]) if unit else 0))


def _setting(default: Any, parse: Callable[[str], Any]) -> Any:
    if callable(default):
        return field(default_factory=default, metadata={"parse": parse})
    return field(default=default, metadata={"parse": parse})


def _default_local_dir() -> str:
    """``$XDG_CACHE_HOME/s3cache``, or a directory of ours in the temporary one without a home."""
    home = os.path.expanduser("~")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if os.access(cache if os.path.isdir(cache) else home, os.W_OK):
        return os.path.join(cache, "s3cache")
    return os.path.join(tempfile.gettempdir(), f"s3cache-{os.geteuid()}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a cache behaves. Times in seconds, sizes in bytes.

    Attributes:
        url: the remote store; ``None`` for none.
        mode: ``read-only`` never uploads, ``write-only`` never looks up, ``off`` does neither.
        strict: raise what would otherwise become a miss and a warning.
        recache: look nothing up, and overwrite what is there with what is saved.
        local: whether to keep a local tier.
        local_dir: its directory, private to this user.
        local_max_bytes, local_max_files: its bounds. The defaults hold some thousand graphs with
            their kernels and leave room on a training node's system disk.
        lookup_timeout_s: the longest a lookup waits for the remote.
        download_concurrency: prefetches at once.
        upload_concurrency: uploads at once.
        prefetch_max_bytes: memory that prefetches take: fewer run at once where objects are large.
        upload_queue_max_count: uploads queued; further ones wait in the local tier.
        upload_queue_max_bytes: payload that uploads hold in memory.
        exit_timeout_s: the longest that leaving the process waits for uploads.
        retry_attempts: tries of one remote call, the first one included.
        attempt_timeout_s: the longest one try of a read may take.
        retry_timeout_s: the longest they may take together; a lookup does not wait for it.
        upload_timeout_s: the longest that one upload may take, with its retries.
        breaker_failures: failed remote reads in a row after which lookups stop asking.
        breaker_reset_s: after that time one asks again.
    """

    url: str | None = _setting(None, _text)
    mode: Mode = _setting("read-write", _mode)
    strict: bool = _setting(False, _flag)
    recache: bool = _setting(False, _flag)
    local: bool = _setting(True, _flag)
    local_dir: str = _setting(_default_local_dir, _text)
    local_max_bytes: int = _setting(10 << 30, _bytes)
    local_max_files: int = _setting(50_000, _count)
    lookup_timeout_s: float = _setting(10.0, _seconds)
    download_concurrency: int = _setting(16, _count)
    upload_concurrency: int = _setting(16, _count)
    prefetch_max_bytes: int = _setting(256 << 20, _bytes)
    upload_queue_max_count: int = _setting(10_000, _count)
    upload_queue_max_bytes: int = _setting(256 << 20, _bytes)
    exit_timeout_s: float = _setting(10.0, _seconds)
    retry_attempts: int = _setting(4, _count)
    attempt_timeout_s: float = _setting(60.0, _more_seconds)
    retry_timeout_s: float = _setting(120.0, _more_seconds)
    upload_timeout_s: float = _setting(900.0, _more_seconds)
    breaker_failures: int = _setting(2, _count)
    breaker_reset_s: float = _setting(30.0, _more_seconds)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.name != "url":
                value = _checked(each.name, value, each.metadata["parse"])
                object.__setattr__(self, each.name, value)

    @classmethod
    def load(cls, **arguments: Any) -> tuple[Settings, dict[str, Any]]:
        """Settings from arguments and environment, and the arguments that are the store's.

        Arguments that are ``None`` count as not given; strings are parsed as in the environment.

        Raises:
            ConfigError: a value cannot be used, or an argument is neither a setting nor a store's.
        """
        known = {each.name: each.metadata["parse"] for each in fields(cls)}
        values: dict[str, Any] = {}
        for name, parse in known.items():
            argument, variable = arguments.get(name), os.environ.get(_PREFIX + name.upper())
            if argument is not None:
                values[name] = argument
            elif variable:
                values[name] = _parse(_PREFIX + name.upper(), variable, parse)
        rest = {name: value for name, value in arguments.items() if name not in known}
        for name in rest:
            if name not in _STORE_OPTIONS:
                everything = sorted([*known, *_STORE_OPTIONS])
                close = get_close_matches(name, everything, n=1)
                fix = f"did you mean {close[0]}?" if close else f"use {', '.join(everything)}"
                raise ConfigError(f"option {name}", "is not known", fix)
        return cls(**values), {name: value for name, value in rest.items() if value is not None}


# S3's, and "create" of a directory. Bucket and prefix are in the URL.
_STORE_OPTIONS = (
    *(e.name for e in fields(S3Options) if e.name not in ("bucket", "prefix")),
    "create",
)


def _checked(name: str, value: Any, parse: Callable[[str], Any]) -> Any:
    """``value`` as the setting has it; what the environment could not say is refused here too."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return _parse(name, value, parse)
    text = f"{value:f}" if isinstance(value, float) else str(value)
    if parse is _text or not isinstance(value, bool | int | float):
        raise ConfigError(f"setting {name}", f"is a {type(value).__name__}", "give a string")
    _parse(name, text, parse)
    return value


def _parse(name: str, value: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(value)
    except ValueError as exc:
        raise ConfigError(f"setting {name}", f"{value!r} {exc}", "correct or unset it") from None


def warn_of_unknown_variables() -> None:
    """Log each ``S3CACHE_*`` variable that nothing reads: most likely it is misspelt."""
    known = [each.name for each in fields(Settings)] + [*_STORE_OPTIONS]
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX).lower()
        if variable.startswith(_PREFIX) and name not in known and not name.startswith("test_"):
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {_PREFIX}{close[0].upper()}?" if close else "nothing reads it"
            logger.warning("s3cache: environment variable %s is not known; %s", variable, hint)
