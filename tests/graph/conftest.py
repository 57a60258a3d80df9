"""These judge and digest graphs, and compile nothing."""

from __future__ import annotations

import tests.support.compiler  # noqa: F401
