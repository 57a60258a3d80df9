"""A program of the catalog, run on machines one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from tests.frameworks.catalog import FOLDER, Program
from tests.support.trials import Place, Trial

__all__ = ["RUNS", "run_program"]

#: Which machine, and how s3cache is turned on there: ``url`` is by ``S3CACHE_URL`` alone.
#: A name with ``again`` is a second process there.
RUNS = {
    "alone": "not",
    "alone again": "not",
    "first": "run",
    "first again": "enable",
    "second": "run",
    "third": "url",
}
_TWO_LINES = "import s3cache\n\ns3cache.enable()\n\n"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


def run_program(
    root: Path, name: str, program: Program, runs: Collection[str], *, headers: Path | None = None
) -> Iterator[tuple[str, Trial]]:
    """Each of ``runs``, in the order of :data:`RUNS`, and what it came to.

    Args:
        root: of the machines, and of the remote that those with s3cache share.
        headers: where machines that compile keep the headers that they precompile, which takes
            longer than a small program; ``None``: nothing is precompiled, or tried out.

    Raises:
        AssertionError: the program ended badly.
    """
    with_lines = root / f"{name}.py"
    with_lines.write_text(_TWO_LINES + (FOLDER / f"{name}.py").read_text("utf-8"), "utf-8")
    places: dict[str, Place] = {}
    for what, how in RUNS.items():
        if what in runs:
            machine = what.removesuffix(" again")
            if machine not in places:
                environment = _environment(program, headers, compiles=machine in ("alone", "first"))
                if how != "not":
                    environment["S3CACHE_URL"] = f"file://{root}/remote?create=1"
                places[machine] = Place(root / machine, **environment)
            yield what, places[machine].run(*_command(name, program, how, with_lines))


def _command(name: str, program: Program, how: str, with_lines: Path) -> list[str]:
    """What ``python`` is given."""
    command = []
    if program.ranks > 1:
        # Into one file each, or they write into each other's lines.
        command = [*_TORCHRUN, "--redirects=1", "--log-dir=logs"]
        command += [f"--nproc-per-node={program.ranks}"]
    if how == "enable":
        return [*command, str(with_lines)]
    return [
        *command,
        *(["-m", "s3cache", "run"] if how == "run" else []),
        str(FOLDER / f"{name}.py"),
    ]


def _environment(program: Program, headers: Path | None, *, compiles: bool) -> dict[str, str]:
    environment = {
        "PYTHONPATH": program.path,
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        # Threads add to the gradient of an embedding in any order; losses are compared bit by bit.
        "OMP_NUM_THREADS": "1",
    }
    if headers is None:
        environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
        environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # what torch would try out with a compiler
    elif compiles:
        headers.mkdir(exist_ok=True)
        environment.update(TMPDIR=str(headers), USER="compiler")
    return environment
