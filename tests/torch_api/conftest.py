"""Import torch for all tests of its internals."""

from __future__ import annotations

import tests.support.compiler  # noqa: F401
