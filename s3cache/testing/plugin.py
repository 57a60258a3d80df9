"""pytest fixtures for programs that use s3cache; pytest finds them where it is installed.

``s3cache_machine`` makes fresh machines, ``s3cache_moto`` is an empty bucket, and
``s3cache_moto_server`` the server that it is on.

Every run of pytest there loads this module, whatever it tests: it imports nothing of weight, and
what a fixture needs is imported by the first test that asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3cache.testing.machines import Machine
    from s3cache.testing.moto import MotoBucket, MotoServer

__all__ = ["MachineFactory", "s3cache_machine", "s3cache_moto", "s3cache_moto_server"]

# The contract's asserts then tell what they compared, as those of a test module do.
pytest.register_assert_rewrite("s3cache.testing.contract")


class MachineFactory(Protocol):
    """What the fixture ``s3cache_machine`` is."""

    def __call__(self, **environment: str) -> Machine:
        """A machine that nothing has run on, with variables for all its processes."""
        ...


@pytest.fixture
def s3cache_machine(tmp_path_factory: pytest.TempPathFactory) -> MachineFactory:
    """Make fresh machines: ``s3cache_machine(NAME="value")`` is a new one each time."""
    from s3cache.testing.machines import Machine

    def make(**environment: str) -> Machine:
        return Machine(tmp_path_factory.mktemp("machine-"), **environment)

    return make


@pytest.fixture
def s3cache_moto(s3cache_moto_server: MotoServer) -> MotoBucket:
    """An empty bucket for this test alone, on a moto server."""
    return s3cache_moto_server.make_bucket()


@pytest.fixture(scope="session")
def s3cache_moto_server() -> Iterator[MotoServer]:
    """The moto server that all tests of this run share; it starts with the first that needs it."""
    from s3cache.testing.moto import MotoServer

    with MotoServer() as server:
        yield server
