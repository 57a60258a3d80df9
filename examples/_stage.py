"""Shared parts of the demos: machines with empty disks, a bucket, and the cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console

from s3cache.errors import S3CacheError
from s3cache.store import S3Options, open_store
from s3cache.testing import MotoServer

__all__ = ["DemoError", "Job", "Machine", "bucket", "present"]

_ROOT = Path(__file__).resolve().parent.parent
_JOB_TIMEOUT_S = 600.0


class DemoError(Exception):
    """The demo itself could not continue."""


def present(tour: Callable[[Console, Path, ExitStack], bool]) -> int:
    """Run a demo in a temporary directory, always clean up, and return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    console = Console()
    began_s = time.monotonic()
    try:
        with ExitStack() as stack:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="s3cache-demo-"))
            good = tour(console, Path(root), stack)
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 130
    except DemoError as error:
        console.print(f"The demo failed: {error}", markup=False, soft_wrap=True)
        return 1
    console.print(
        f"{time.monotonic() - began_s:.0f} s, everything is cleaned up.",
        style="dim",
        highlight=False,
    )
    return 0 if good else 1


def _stop(number: int, frame: object) -> None:
    # Like Ctrl-C: every `with` and `finally` cleans up.
    raise SystemExit(128 + number)


class Job:
    """A running process that prints one JSON object per line."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self.killed = False

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return all output to the end; after a kill, the output before it."""
        assert self._popen.stdout is not None
        return map(json.loads, self._popen.stdout)

    def kill(self) -> None:
        """Send SIGKILL, as if its machine went away."""
        self.killed = True
        self._popen.kill()


class Machine:
    """A computer with empty disks, as far as a process can tell.

    Args:
        root: directory of its files, below ``name``.
        python: its interpreter.
    """

    def __init__(
        self,
        console: Console,
        root: Path,
        name: str,
        environment: Mapping[str, str],
        python: str | Path = sys.executable,
    ) -> None:
        self._console = console
        self._stderr = root / f"{name}.log"
        self._environment = dict(environment)
        self._python = python
        for variable in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
            path = root / name / variable.lower()
            path.mkdir(parents=True, mode=0o700)
            self._environment[variable] = str(path)

    @contextmanager
    def job(self, module: str, *arguments: str) -> Iterator[Job]:
        """Run a module until it ends or is killed; show its warnings.

        Raises:
            DemoError: it failed, or took too long.
        """
        with (
            self._stderr.open("ab") as stderr,
            process(
                module, *arguments, env=self._environment, stderr=stderr, python=self._python
            ) as popen,
        ):
            overdue = threading.Timer(_JOB_TIMEOUT_S, popen.kill)
            overdue.daemon = True
            overdue.start()
            job = Job(popen)
            yield job
            status = popen.wait()
            overdue.cancel()
        self._show_warnings()
        if status != 0 and not (job.killed and status == -signal.SIGKILL):
            raise DemoError(f"a machine ended with status {status}")

    def _show_warnings(self) -> None:
        text = self._stderr.read_text(errors="replace")
        if text:
            self._console.print(
                text, style="yellow", markup=False, highlight=False, soft_wrap=True, end=""
            )
        self._stderr.write_text("")


@contextmanager
def process(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    stderr: Any,
    python: str | Path = sys.executable,
) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process that ends with the block; the terminal's Ctrl-C does not reach it."""
    started: subprocess.Popen[str] | None = None
    try:
        with _uninterrupted():
            started = subprocess.Popen(
                [str(python), "-m", module, *arguments],
                cwd=_ROOT,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        yield started
    finally:
        if started is not None:
            started.kill()
            with started:  # closes its pipes and waits for it
                pass


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay signals that end the demo to the end of the block.

    A Ctrl-C during the start of a process would leave it running, unknown to the demo.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def bucket(console: Console) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the machines' environment and the URL of an empty place in a bucket.

    The place is below ``S3CACHE_URL``, and is emptied at the end. Without that variable, the bucket
    is on a server of the demo's own.
    """
    environment = _basic_environment()
    with ExitStack() as stack:
        if url := os.environ.get("S3CACHE_URL", ""):
            environment.update(_users_s3_environment())
            where, found = url.partition("?")[0], stack.enter_context(_users_bucket(url))
        else:
            where = "moto, an S3 server in memory, on this machine's loopback"
            server = stack.enter_context(MotoServer())
            made = server.make_bucket("compile-cache")
            environment.update(made.environment)
            found = made.url
        console.print(f"Bucket: {where}\n", highlight=False, soft_wrap=True)
        yield environment, found


def _basic_environment() -> dict[str, str]:
    """Return variables that any process needs, without the user's own caches and buckets."""
    wanted = ("PATH", "LANG", "LD_LIBRARY_PATH")
    return {
        name: value
        for name, value in os.environ.items()
        if name in wanted or name.startswith("LC_")
    }


def _users_s3_environment() -> dict[str, str]:
    """Return the variables with which the user's machine reaches S3."""
    s3_options = {f"S3CACHE_{each.name.upper()}" for each in fields(S3Options)}
    found = {
        name: value
        for name, value in os.environ.items()
        if name in s3_options or name.startswith("AWS_") or name.lower().endswith("_proxy")
    }
    # The machines' homes are empty, and a profile lives in the user's.
    home = Path.home() / ".aws"
    found.setdefault("AWS_CONFIG_FILE", str(home / "config"))
    found.setdefault("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    return found


@contextmanager
def _users_bucket(url: str) -> Iterator[str]:
    """Check ``url``, and yield a new prefix below it; empty the prefix at the end."""
    if url.startswith("memory:"):
        raise DemoError("a memory:// store belongs to one process: unset S3CACHE_URL or use s3://")
    parts = urlsplit(url)
    parts = parts._replace(path=f"{parts.path.rstrip('/')}/demo-{uuid.uuid4().hex}")
    if parts.scheme == "s3" and "conditional_create=" not in parts.query:
        # Else the store writes a marker to test the server, and the marker would stay.
        parts = parts._replace(query=f"{parts.query}&conditional_create=check".lstrip("&"))
    below = parts.geturl()
    try:
        asyncio.run(_for_each_object(below, delete=False))
        try:
            yield below
        finally:
            asyncio.run(_for_each_object(below, delete=True))
            if parts.scheme == "file":  # the killed process may have left a part of one
                shutil.rmtree(unquote(parts.path), ignore_errors=True)
    except S3CacheError as error:
        raise DemoError(f"S3CACHE_URL cannot be used: {error}") from error


async def _for_each_object(url: str, *, delete: bool) -> None:
    store = open_store(url)
    try:
        for name in [info.key async for info in store.list()]:
            if delete:
                await store.delete(name)
    finally:
        await store.aclose()
