"""Operators that do not come to a hit with equal results, and why not."""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, str] = {}
