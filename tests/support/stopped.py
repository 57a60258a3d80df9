"""Scripts that use a local directory or tier, in processes that a test stops and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3cache.tier import DiskTier

REPOSITORY = Path(__file__).parents[2]


# The start of every script. A body contains its own name and digest.
PRELUDE = """
import contextlib, hashlib, itertools, json, os, random, shutil, signal, sys, time
from pathlib import Path

from s3cache.errors import *
from s3cache.store import ObjectFiles
from s3cache.util.threads import DeadlineExecutor
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from s3cache.util.threads import close_unshared

root = sys.argv[1]


@contextlib.contextmanager
def locked():
    fd = ObjectFiles(root).directory().try_lock("usage")
    assert fd is not None
    yield
    close_unshared(fd)


DeadlineExecutor.limit_s = 120.0  # many processes on few cores


def body(name, payload):
    content = name.encode() + b"\\0" + payload
    return hashlib.sha256(content).digest() + content


def check_whole(name, data):
    assert hashlib.sha256(data[32:]).digest() == data[:32], f"{name} is corrupt"
    assert data[32:].startswith(name.encode() + b"\\0"), f"{name} is another object"


def on_disk():
    sizes = [path.stat().st_size for path in Path(root, "objects").rglob("*") if path.is_file()]
    return Usage(sum(sizes), len(sizes))


def check_all(tier):
    assert tier.usage() == on_disk(), (tier.usage(), on_disk())
    for info in list(tier.objects()):
        check_whole(info.key, tier.get(info.key))


def say(*words):
    print(*words, flush=True)


def hear():
    assert sys.stdin.readline(), "the test is gone"

"""


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return line.strip()


def send_line(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr


def stop(process: subprocess.Popen[str]) -> None:
    """Stop the process: it is alive but does nothing."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def open_tier(root: Path) -> DiskTier:
    return DiskTier(root, max_bytes=1 << 30, max_files=1_000)


def descriptors(root: Path) -> int:
    """Return how many descriptors lead below ``root``; others may be closed meanwhile."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(root))
    return count


@pytest.fixture
def start(root: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process with a script; it is killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *args: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(root), *map(str, args)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
