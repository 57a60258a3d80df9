"""An environment in which nothing is set."""

from __future__ import annotations

from tests.support.environment import clean_environment

__all__ = ["clean_environment"]
