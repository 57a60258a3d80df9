"""Manifests: files that name entries, one to a line."""

from __future__ import annotations

import json
from collections.abc import Iterable

from s3cache import entries
from s3cache.catalog._items import place_in
from s3cache.errors import ConfigError

__all__ = ["read_manifest"]

_SHOWN = 60


def read_manifest(where: str, lines: Iterable[str]) -> list[str]:
    """The keys, and names of objects, that a manifest has, in its order and each once.

    A line is a key, the name of an object as ``v1/3f2/KEY.0``, or what ``s3cache ls --json``
    prints of one; what follows a ``#`` is a comment.

    Args:
        where: what errors call it.

    Raises:
        ConfigError: a line is something else.
    """
    found: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        if (
            text := line.strip()
            if line.lstrip().startswith("{")
            else line.partition("#")[0].strip()
        ):
            name = place_in(_name_in(text))
            if not _is_name(name):
                raise ConfigError(
                    f"manifest {where}, line {number}",
                    f"{text[:_SHOWN]!r} names no entry",
                    "give one key to a line, or what s3cache ls --json prints",
                )
            found[name] = None
    return [*found]


def _name_in(text: str) -> str:
    if not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    name = value.get("name") or value.get("key")
    return name if isinstance(name, str) else ""


def _is_name(name: str) -> bool:
    key = entries.key_of(name)
    try:
        entries.check_key(key)
    except ConfigError:
        return False
    return name == key or name.startswith(entries.name_prefix(key))
