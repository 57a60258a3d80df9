"""Processes that start with torch's compiler imported, which otherwise takes five seconds.

Servers import it once for all tests of a run, and fork for each job of a machine. The job has its
machine's environment and directories and its own session, and runs exit handlers like any program.
But it shares addresses and the hash seed with other jobs of its server: two processes that have to
find each other's entries are forks of two servers.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pkgutil
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from s3cache.testing import Machine

# Variables that torch does not read during its import, so each job may have its own.
_OWN = {"HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "USER", "PATH"}
_OWN |= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_ENABLING = {"S3CACHE_URL", "S3CACHE_AUTOLOAD"}  # with these, ``import torch`` enables s3cache

# Modules that the compiler would import in each process that compiles.
_AT_FIRST_GRAPHS = (
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)

_CLIENT = """\
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    wanted = {"words": sys.argv[2:], "environment": dict(os.environ), "cwd": os.getcwd()}
    socket.send_fds(server, [json.dumps(wanted).encode() + b"\\n"], [0, 1, 2])
    status = int(server.makefile().read() or 70)  # 70: the server has died
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Forks:
    """A server that forks, and a client that replaces Python.

    Args:
        machine: of the server. Machines of jobs may differ only in variables that torch does not
            read during its import.
        owner: a process ID. When that process ends, the server removes its machine and ends too.
            Processes with the same owner and machine share a server; the first of them starts it.
    """

    def __init__(self, machine: Machine, owner: int) -> None:
        self._known = _seen_by_torch(machine.environment)
        path = str(machine.root / "socket")
        client = machine.root / "client.py"
        words = map(shlex.quote, [sys.executable, "-IS", str(client), path])
        self._client = machine.root / "python"
        with open(machine.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._client.exists():
                return
            client.write_text(_CLIENT, encoding="utf-8")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(listener.fileno()), str(owner)],
                    cwd=Path(__file__).parents[2],
                    env=machine.environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            self._client.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n', encoding="utf-8")
            self._client.chmod(0o755)

    def python(self, environment: Mapping[str, str]) -> str:
        """Return a command that runs ``-m MODULE ...`` in a fork; Python if torch would differ."""
        is_known = _seen_by_torch(environment) == self._known
        return str(self._client) if is_known else sys.executable


def _seen_by_torch(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in _ENABLING or not (name in _OWN or name.startswith(("AWS_", "S3CACHE_")))
    }


# -- the server


def _serve(listener: socket.socket, owner: int) -> dict[str, Any] | None:
    """Fork for each client. Return its job in the fork, and ``None`` when the owner has ended."""
    while True:
        ready, _, _ = select.select([listener.fileno(), owner], [], [])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if owner in ready:
            return None
        client, _ = listener.accept()
        with client:
            if not os.fork():
                listener.close()
                os.close(owner)
                return _supervised(client)


def _supervised(client: socket.socket) -> dict[str, Any]:
    """Fork again: the new process returns the job, this one watches the job and the client."""
    data, files, _, _ = socket.recv_fds(client, 1 << 16, 3)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 16)
    job = os.fork()
    if not job:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        wanted: dict[str, Any] = json.loads(data)
        return wanted
    pidfd = os.pidfd_open(job)
    if pidfd not in select.select([pidfd, client.fileno()], [], [])[0]:  # the client was killed
        with suppress(ProcessLookupError):
            os.killpg(job, signal.SIGKILL)
    _, status = os.waitpid(job, 0)
    with suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _patterns() -> list[str]:
    """Return the modules with Inductor's patterns, which take a second to import."""
    from torch._inductor.fx_passes import serialized_patterns as package

    return [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]


def _main() -> None:
    owner = os.pidfd_open(int(sys.argv[2]))
    import torch._inductor.compile_fx  # noqa: F401 - much of torch comes with it

    for name in (*_AT_FIRST_GRAPHS, *_patterns()):
        with suppress(ImportError):  # another release
            importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        place = os.path.dirname(listener.getsockname())
        wanted = _serve(listener, owner)
    if wanted is None:
        shutil.rmtree(place)
        with suppress(OSError):  # other servers are there
            os.rmdir(os.path.dirname(place))
        return
    _, module, *arguments = wanted["words"]
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    paths = [wanted["cwd"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = dict.fromkeys([*paths, *sys.path[1:]])
    sys.argv[1:] = arguments
    tempfile.tempdir = None
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
