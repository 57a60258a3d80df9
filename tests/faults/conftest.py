"""A server, a bad link to it, and machines that use it."""

from __future__ import annotations

from tests.support.environment import clean_environment
from tests.support.served import NewMachine, bucket, moto_port, new_machine, proxy, url

__all__ = [
    "NewMachine",
    "bucket",
    "clean_environment",
    "moto_port",
    "new_machine",
    "proxy",
    "url",
]
