"""A remote, and what a job wrote there."""

from __future__ import annotations

from tests.support.sites import site, written

__all__ = ["site", "written"]
