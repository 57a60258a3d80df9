"""Internals of torch are looked at where they are."""

from __future__ import annotations

import tests.support.compiler  # noqa: F401
