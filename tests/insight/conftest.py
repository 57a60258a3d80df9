"""An environment in which nothing is set, and a bucket for those who ask for it."""

from __future__ import annotations

from tests.support.environment import clean_environment
from tests.support.served import bucket, moto_port, url

__all__ = ["bucket", "clean_environment", "moto_port", "url"]
