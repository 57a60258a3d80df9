"""Imports for tests of torch's internals."""

from __future__ import annotations

import tests.support.compiler  # noqa: F401
