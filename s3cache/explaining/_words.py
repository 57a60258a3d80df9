"""Texts of parts taken to pieces: ``name=value`` of a mode, of a tensor, of options."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["fields_of", "items_of", "pieces"]

_OPEN, _CLOSE = "([{", ")]}"


def pieces(text: str, separator: str) -> Iterator[str]:
    """``text`` between separators that are in no brackets and no quotes."""
    depth, quote, start = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif depth == 0 and at >= start and text.startswith(separator, at):
            yield text[start:at]
            start = at + len(separator)
    yield text[start:]


def fields_of(text: str, separator: str = " ") -> dict[str, str]:
    """Values by name, where ``text`` is ``name=value`` with separators between; else nothing."""
    found: dict[str, str] = {}
    for piece in pieces(text, separator):
        name, equals, value = piece.partition("=")
        is_name = not name or name.replace(".", "").replace("_", "").isalnum()
        if not (equals and is_name):
            return {}
        found[name] = value
    return found


def items_of(text: str) -> list[str]:
    """The items of a list in brackets."""
    if not (text.startswith("[") and text.endswith("]")) or len(text) < 3:
        return []
    return list(pieces(text[1:-1], ", "))
