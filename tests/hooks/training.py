"""A training step under each class of fault: what it comes to, and how long it took."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Fault = Callable[[str], contextlib.AbstractContextManager[dict[str, Any]]]

KEYS = {"access_key": "testing", "secret_key": "testing", "region": "us-east-1"}


def _step() -> list[Any]:
    """The losses and gradients of two steps."""
    import torch

    torch.compiler.reset()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    compiled = torch.compile(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seen: list[Any] = []
    for number in range(2):
        loss = compiled(torch.linspace(-1, 1 + number, 32).view(4, 8)).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        seen.append([loss.item(), [each.tolist() for each in gradients if each is not None]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


# -- the network, and servers that are none


@contextlib.contextmanager
def _listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port on which each connection is answered so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        for connection in held:
            connection.close()


def _at(port: int) -> dict[str, Any]:
    return {"url": "s3://bucket/x", "endpoint_url": f"http://127.0.0.1:{port}", **KEYS}


@contextlib.contextmanager
def _hangs(_: str) -> Iterator[dict[str, Any]]:
    with _listening(lambda _: None) as port:
        yield {**_at(port), "lookup_timeout_s": 1, "attempt_timeout_s": 1}


@contextlib.contextmanager
def _refuses(_: str) -> Iterator[dict[str, Any]]:
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def refuse(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(answer)
        connection.close()

    with _listening(refuse) as port:
        yield _at(port)


# -- entries that are not what they should be


def _entries(of: Callable[[bytes], bytes]) -> Fault:
    """The remote, with something done to each object."""

    @contextlib.contextmanager
    def fault(remote: str) -> Iterator[dict[str, Any]]:
        copy = Path(f"{remote}-damaged")
        shutil.copytree(remote, copy)
        for path in (copy / "objects").rglob("*"):
            if path.is_file():
                path.write_bytes(of(path.read_bytes()))
        yield {"url": f"file://{copy}", "local": False}
        shutil.rmtree(copy)

    return fault


def _flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


# -- what the machine lacks


@contextlib.contextmanager
def _no_room(remote: str) -> Iterator[dict[str, Any]]:
    """The local tier's file system is full. Where none may be mounted, one that is too small."""
    place = Path(f"{remote}-full")
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=0700", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    few = {} if mounted else {"local_max_bytes": 4096}
    try:
        yield {"url": f"file://{remote}", "local_dir": str(place / "tier"), **few}
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def _no_memory(remote: str) -> Iterator[dict[str, Any]]:
    """Enough to compile in, but not for the entry, which has grown to 600 MiB."""
    copy = Path(f"{remote}-grown")
    shutil.copytree(remote, copy)
    for path in (copy / "objects").rglob("*"):
        if path.is_file():
            os.truncate(path, 600 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    try:
        yield {
            "url": f"file://{copy}",
            "local": False,
            "before": lambda: resource.setrlimit(
                resource.RLIMIT_AS, (used + (400 << 20), before[1])
            ),
        }
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        shutil.rmtree(copy)


@contextlib.contextmanager
def _no_threads(remote: str) -> Iterator[dict[str, Any]]:
    """As where the number of processes is limited."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.Thread.start
    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield {"url": f"file://{remote}", "local": False}
    finally:
        threading.Thread.start = before  # type: ignore[method-assign]


FAULTS: dict[str, Fault] = {
    "the server hangs": _hangs,
    "the server refuses": _refuses,
    "a bit of an entry is another": _entries(_flipped),
    "the disk is full": _no_room,
    "there is no memory for the entry": _no_memory,
    "no thread can start": _no_threads,
}


def under_faults(remote: str) -> dict[str, Any]:
    """For each fault: whether the steps were as without a cache, and what was counted."""
    import torch._functorch.config as functorch

    import s3cache
    from tests.hooks.jobs import account

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        os.environ.pop(name, None)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    with functorch.patch(enable_autograd_cache=False):
        expected = _step()
    with s3cache.enabled(f"file://{remote}?create=1", local=False) as cache:
        assert _step() == expected
        assert not cache.flush(30).remaining
        assert account(cache)["saved"] > 0
    came_to = {}
    for name, fault in FAULTS.items():
        began = time.monotonic()
        with fault(remote) as options:
            before = options.pop("before", None)
            with s3cache.enabled(**{"exit_timeout_s": 1, **options}) as cache:
                if before is not None:
                    before()
                right = _step() == expected
                told = account(cache)
        took = time.monotonic() - began
        print(f"{name}: {took:.1f} s", file=sys.stderr)
        came_to[name] = {"right": right, "seconds": took, **told}
    with s3cache.enabled(f"file://{remote}", local=False) as cache:
        assert _step() == expected
        came_to["none"] = account(cache)
    return came_to
