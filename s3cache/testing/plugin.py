"""pytest fixtures for programs that use s3cache; pytest loads them if s3cache is installed.

Every run of pytest loads this module, so it imports nothing expensive. The first test that uses a
fixture imports its dependencies.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from s3cache.testing.machines import Machine

_HOST = "127.0.0.1"


#: The type of the fixture ``s3cache_machine``: it takes variables for all processes.
MachineFactory: TypeAlias = "Callable[..., Machine]"


@pytest.fixture
def s3cache_machine(tmp_path_factory: pytest.TempPathFactory) -> MachineFactory:
    """Make fresh machines: every ``s3cache_machine(NAME="value")`` is a new one."""
    from s3cache.testing.machines import Machine

    def make(**environment: str) -> Machine:
        return Machine(tmp_path_factory.mktemp("machine-"), **environment)

    return make


@pytest.fixture
def s3cache_moto(s3cache_moto_server: MotoServer) -> MotoBucket:
    """Make an empty bucket for this test, on a moto server."""
    return s3cache_moto_server.make_bucket()


@pytest.fixture(scope="session")
def s3cache_moto_server() -> Iterator[MotoServer]:
    """Start the moto server that all tests of this run share, at its first use."""
    with MotoServer() as server:
        yield server


# -- the moto server


@dataclass(frozen=True)
class MotoBucket:
    """A bucket on a :class:`MotoServer`, with credentials; the server accepts any."""

    name: str
    endpoint_url: str
    access_key: str = "testing"
    secret_key: str = field(default="testing-secret", repr=False)
    region: str = "us-east-1"

    @property
    def url(self) -> str:
        """The URL for :func:`s3cache.enable` and other functions."""
        return f"s3://{self.name}?endpoint_url={self.endpoint_url}&region={self.region}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a program that uses this bucket and these credentials."""
        return {
            "S3CACHE_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class MotoServer(AbstractContextManager["MotoServer"]):
    """moto's server on loopback, from its construction to :meth:`close`; a context manager.

    It runs in a separate process, which always ends with this one. It keeps everything in memory
    and accepts any credentials: a real server is stricter. Raises ConfigError if moto is not
    installed with what its server needs, RuntimeError with its output if it does not start.
    """

    def __init__(self) -> None:
        from s3cache.errors import ConfigError

        for package in ("moto", "flask", "flask_cors"):
            if importlib.util.find_spec(package) is None:
                fix = "run: pip install 'torch-s3cache[testing]'"
                raise ConfigError("moto's S3 server", f"{package} is not installed", fix)
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own text
                [sys.executable, "-W", "ignore", "-c", _SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            assert self._process.stdout is not None
            port = self._process.stdout.readline()
            if not port:
                self.close()
                errors.seek(0)
                raise RuntimeError(f"moto's server did not start:\n{errors.read().decode()}")
        #: Its port.
        self.port = int(port)

    @property
    def endpoint_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def make_bucket(self, name: str | None = None) -> MotoBucket:
        """Make an empty bucket, by default with a unique name; raise OSError if it is refused."""
        from urllib.request import ProxyHandler, Request, build_opener

        name = name or f"test-{uuid.uuid4().hex}"
        request = Request(f"{self.endpoint_url}/{name}", method="PUT")  # noqa: S310 - our own
        build_opener(ProxyHandler({})).open(request, timeout=30).close()
        return MotoBucket(name, self.endpoint_url)

    def close(self) -> None:
        """End the server and remove its buckets. A second call does nothing."""
        self._process.kill()
        self._process.communicate()

    def __exit__(self, *_: object) -> None:
        self.close()


# Text instead of a file here, in the directory of which `import moto` could find other modules.
# It ends with its standard input, and so with the process at the other end.
_SERVER = f"""
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address={_HOST!r}, port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
