"""An S3 server on loopback for tests: moto's, in a process of its own.

It keeps what it is given in its memory, takes any credentials, and ends with the process that
started it, however that ends. What a real server refuses it may accept: it shows that a program
finds its cache, not that its policies are right.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field

from s3cache.errors import ConfigError

__all__ = ["MotoBucket", "MotoServer"]

REGION = "us-east-1"
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class MotoBucket:
    """A bucket on a :class:`MotoServer`, with credentials, of which it takes any."""

    name: str
    endpoint_url: str
    access_key: str = "testing"
    secret_key: str = field(default="testing-secret", repr=False)
    region: str = REGION

    @property
    def url(self) -> str:
        """For :func:`s3cache.enable`, and for everything else that takes a URL."""
        return f"s3://{self.name}?endpoint_url={self.endpoint_url}&region={self.region}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a program that is to use the bucket, and no other credentials."""
        return {
            "S3CACHE_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class MotoServer:
    """The server, from its construction to :meth:`close`; a context manager.

    Raises:
        ConfigError: moto is not installed, or not with what its server needs.
        RuntimeError: the server does not start; says what it wrote.
    """

    def __init__(self) -> None:
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
        #: Where it listens.
        self.port = int(port)

    @property
    def endpoint_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def make_bucket(self, name: str | None = None) -> MotoBucket:
        """Make an empty bucket, of a name of its own unless one is given.

        Raises:
            RuntimeError: the server refuses: there is one of that name, or it is no legal one.
        """
        name = name or f"test-{uuid.uuid4().hex}"
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{name}")
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"bucket {name!r}: {answer.status} {body.decode()}")
        return MotoBucket(name, self.endpoint_url)

    def close(self) -> None:
        """End the server; its buckets are gone. A second call does nothing."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> MotoServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Text, and not a function of this module: beside its own file `import moto` would find that.
# It ends with its standard input, and so with the process that holds the other end.
_SERVER = f"""
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address={_HOST!r}, port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
