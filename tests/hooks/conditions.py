"""Conditions of entries: requirements of their code beside their keys."""

from __future__ import annotations

from typing import Any

#: Conditions of an entry that relies on nothing.
NOTHING: dict[str, Any] = {
    "guards": [],
    "sizes": [],
    "places": None,
    "lowered": None,
    "of_threads": True,
}
