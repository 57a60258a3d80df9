"""What compiles: torch, with the seams that we need, and a C++ compiler."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from s3cache.doctor._check import Check, fault, ok, warning

__all__ = ["check_compiler", "check_torch", "output_of"]

_TORCH = (sys.executable, "-W", "ignore", "-m", "s3cache.torch_api")
_REAP_S = 2.0


def check_torch(timeout_s: float = 180.0, command: Sequence[str] = _TORCH) -> Iterator[Check]:
    """Whether the installed torch has what s3cache uses of it; asked in a process of its own."""
    code, said = output_of(command, timeout_s)
    last = said.strip().splitlines()[-1] if said.strip() else ""
    if code is None:
        yield fault(
            "torch",
            f"cannot be imported within {timeout_s:g} s",
            "look at the disk that it is on, and at the machine's load",
        )
    elif not last.startswith("torch "):
        yield fault("torch", last or f"cannot be imported (exit code {code})", "pip install torch")
    elif "not supported" in last:
        fix = "use a torch that docs/compatibility.md names"
        yield fault("torch", last, fix, "UnsupportedTorchError")
    elif code != 0:
        missing = [line.split()[-1] for line in said.splitlines() if line.startswith("MISSING")]
        names = ", ".join(missing[:3])
        fix = "use a torch as its release has it"
        yield fault("torch", f"{last}: {names}", fix, "UnsupportedTorchError")
    else:
        yield ok("torch", last)


def check_compiler(timeout_s: float = 20.0) -> Iterator[Check]:
    """Whether a miss can be compiled for the CPU. A hit needs no compiler."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        yield warning(
            "compiler",
            f"there is none ({', '.join(names)}): hits need none, and a miss cannot be compiled",
            "install g++, or name one by CXX",
        )
        return
    code, said = output_of([path, "--version"], timeout_s)
    if code != 0:
        how = f"no answer within {timeout_s:g} s" if code is None else f"exit code {code}"
        yield fault("compiler", f"{path} does not work: {how}", "install g++, or name one by CXX")
    else:
        yield ok("compiler", said.splitlines()[0] if said else path)


def output_of(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code, and what it wrote to both; no code if it did not end in time and was killed."""
    try:
        process = subprocess.Popen(  # noqa: S603 - a compiler, or ourselves
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as exc:
        return -1, str(exc)
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # What hangs on a disk cannot even be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_REAP_S)
        return None, ""
    return process.returncode, said
