"""A server, a bad link to it, and machines that use it, as fixtures."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from s3cache.testing import MotoServer
from tests.support.buckets import moto_place
from tests.support.processes import KEYS, Machine
from tests.support.proxy import Proxy

NewMachine = Callable[..., Machine]


@pytest.fixture(scope="session")
def moto_port(s3cache_moto_server: MotoServer) -> int:
    return s3cache_moto_server.port


@pytest.fixture(scope="session")
def bucket(s3cache_moto_server: MotoServer) -> str:
    return moto_place(s3cache_moto_server).bucket


@pytest.fixture
def url(bucket: str) -> str:
    """An empty prefix."""
    return f"s3://{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(moto_port: int) -> Iterator[Proxy]:
    with Proxy(moto_port) as proxy:
        yield proxy


@pytest.fixture
def new_machine(tmp_path: Path, url: str, moto_port: int) -> Iterator[NewMachine]:
    """Return a function that makes a machine with an empty disk; it has a good link to the server
    unless ``endpoint_url`` is set."""
    with ExitStack() as machines:
        numbers = itertools.count()

        def new(**options: object) -> Machine:
            usual = {
                "url": url,
                "endpoint_url": f"http://127.0.0.1:{moto_port}",
                **KEYS,
            }
            return machines.enter_context(
                Machine(tmp_path / f"machine-{next(numbers)}", **{**usual, **options})
            )

        yield new
