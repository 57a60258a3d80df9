"""A server, a bad link to it, and machines that use it, as fixtures."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from s3cache.store import S3Options, parse_url
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
def served_options(moto_port: int) -> dict[str, Any]:
    """Return the server and the keys of a store; tests of another server override this."""
    return {"endpoint_url": f"http://127.0.0.1:{moto_port}", **KEYS}


@pytest.fixture
def s3_options(url: str, served_options: dict[str, Any]) -> S3Options:
    """Return options for an empty prefix."""
    options = parse_url(url, **served_options)
    assert isinstance(options, S3Options)
    return options


@pytest.fixture
def proxy(served_options: dict[str, Any]) -> Iterator[Proxy]:
    with Proxy(urlsplit(served_options["endpoint_url"]).port or 80) as proxy:
        yield proxy


@pytest.fixture
def new_machine(tmp_path: Path, url: str, served_options: dict[str, Any]) -> Iterator[NewMachine]:
    """Return a function that makes a machine with an empty disk; it has a good link to the server
    unless ``endpoint_url`` is set."""
    with ExitStack() as machines:
        numbers = itertools.count()

        def new(**options: object) -> Machine:
            everything = {"url": url, **served_options, **options}
            place = tmp_path / f"machine-{next(numbers)}"
            return machines.enter_context(Machine(place, **everything))

        yield new


def check_all_arrived(machine: Machine, expected: list[str]) -> None:
    """Check that a machine with an empty disk reads each entry, byte for byte."""
    lines = machine.run(["check", expected])
    assert Counter(line.split()[0] for line in lines) == {"hit": len(expected)}
    assert all(line.endswith(" remote") for line in lines)
