"""Two machines, one store, a GPU: the second hits, compiles no kernel, and gets equal numbers.

Two processes run the same jobs one after the other, with fresh directories and a ``file://`` store.
The directories of the first are removed before the second starts. Prints a table, writes JSON, and
ends with 1 if a check fails. It needs torch with CUDA, Triton and s3cache, and nothing else from
this repository: ``infra/gpu/bundle.sh`` packs it for a machine without a network.

``--standin FILE`` replaces the GPU with a stand-in that has the properties in the file (see
``infra/gpu/standin.sh``). Its kernels do nothing, numbers are not compared, and CUDA graphs are
left out. With ``--warm``, the
first machine runs the jobs by ``s3cache warm --target``, without the GPU that the second has.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path

try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit("error: Triton is not installed: take a torch with CUDA")

LIMIT_S = float(os.environ.get("REHEARSAL_LIMIT_S", "540"))
# By job: its model, its type, and its options of torch.compile.
JOBS = {
    "mlp": ("mlp", "float32", {}),
    "mlp bf16": ("mlp", "bfloat16", {}),
    "gpt": ("gpt", "float32", {}),
    "softmax, several configurations": ("softmax", "float32", {}),
    "user's kernel": ("user", "float32", {}),
    "dynamic shapes": ("mlp", "float32", {"dynamic": True}),
    "max-autotune": ("mlp", "float16", {"options": {"max_autotune": True}}),
    "coordinate descent": ("softmax", "float32", {"options": {"coordinate_descent_tuning": True}}),
    "flex attention": ("flex", "float32", {}),
    "cpp_wrapper": ("mlp", "float32", {"options": {"cpp_wrapper": True}}),
    "cpp_wrapper, several configurations": (
        "softmax",
        "float32",
        {"options": {"cpp_wrapper": True}},
    ),
    # No other job has its kernels, so that ptxas has to run for it.
    "reduce-overhead": ("gpt", "bfloat16", {"mode": "reduce-overhead"}),
}
NEEDS_GPU = {"reduce-overhead"}
NEEDS_HEADERS = {"cpp_wrapper", "cpp_wrapper, several configurations"}
# Jobs that measure kernels while they compile: without a GPU, they are not saved.
MEASURED = {"max-autotune"}
# Jobs that search when kernels run: the first machine with the GPU does so.
SEARCHED = {"coordinate descent"}
# Jobs that the machine with the GPU measures, since a stand-in cannot.
SEVERAL = {"softmax, several configurations", "cpp_wrapper, several configurations"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--standin", metavar="FILE", help="JSON that describes the GPU")
    parser.add_argument("--warm", action="store_true", help="the first machine has no GPU")
    parser.add_argument("--json", metavar="FILE", help="where to write the table as JSON")
    parser.add_argument("--only", action="append", metavar="JOB", choices=JOBS)
    parser.add_argument("--job", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.only or [job for job in JOBS if not (options.standin and job in NEEDS_GPU)]
    if options.job:
        work(Path(options.job), names)
        return 0
    with tempfile.TemporaryDirectory(prefix="s3cache-gpu-") as directory, ExitStack() as stack:
        if NEEDS_HEADERS.intersection(names) and (missing := no_headers(Path(directory))):
            print(f"left out: {', '.join(sorted(NEEDS_HEADERS.intersection(names)))}: {missing}")
            names = [name for name in names if name not in NEEDS_HEADERS]
        gpu = {}
        if options.standin:
            from s3cache.features.target.standin import environment

            device = json.loads(Path(options.standin).read_text())["device"]
            gpu = stack.enter_context(environment(device))
        report = rehearse(Path(directory), names, gpu, warm=options.warm)
    show(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["faults"] else 0


# -- the two machines


def rehearse(root: Path, names: list[str], gpu: dict, *, warm: bool) -> dict:
    started = time.monotonic()
    shared = root / "shared"
    shared.mkdir()
    jobs, first = {}, []
    if warm:
        target = describe(shared / "gpu.json", gpu)
        first = ["-m", "s3cache", "warm", "--quiet", "5m", "--target", str(target), "--"]
        first.append(sys.executable)
    for machine in ("first", "second"):
        place = root / machine
        left_s = LIMIT_S - (time.monotonic() - started)
        if machine == "first":
            jobs[machine] = run(place, shared, names, {} if warm else gpu, left_s, first)
            named = names_of(place, shared / "store")
            saved = entries_in(shared / "store")
            shutil.rmtree(place)
        else:
            jobs[machine] = run(place, shared, names, gpu, left_s)
    faults = [f"an entry names a directory of the first machine: {name}" for name in named]
    if (root / "first").exists():
        faults.append("the second machine wrote into directories of the first")
    for name in names:
        first, second = (jobs[machine].get(name, {"error": "it did not run"}) for machine in jobs)
        if warm and name in SEARCHED:
            continue
        if warm and name in MEASURED:
            if not second.get("compiled"):
                faults.append(f"{name}: it was saved, though nothing was measured")
            continue
        if warm and name in SEVERAL and not second.get("left"):
            faults.append(f"{name}: nothing is left, though nothing was measured")
        faults += [
            f"{name}: {text}" for text in judge(first, second, compared=not gpu, sealed=not warm)
        ]
    hit, missed = looked_up(root / "second/s3cache_local_dir")
    if warm and (hit != saved or (missed and not MEASURED.intersection(names))):
        faults.append(f"saved: {sorted(saved)}; hit: {sorted(hit)}; missed: {sorted(missed)}")
    return {
        "warm": warm,
        "device": "stand-in" if gpu else jobs["first"].get("device"),
        "torch": jobs["first"].get("torch"),
        "triton": triton.__version__,
        "seconds": round(time.monotonic() - started),
        "keys": {"saved": len(saved), "hit": len(hit), "missed": len(missed)},
        "jobs": {name: {m: jobs[m].get(name) for m in jobs} for name in names},
        "faults": faults,
    }


def no_headers(root: Path) -> str:
    """Set up CUDA's headers and libraries of pip for C++; return the reason if that fails."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        return "this torch loads such kernels by path, so they are not shared"
    packages = Path(torch.__file__).parents[1] / "nvidia/cu13"
    if not (packages / "include/crt/host_config.h").exists():
        return "the headers of CUDA 13 are missing: pip install nvidia-cuda-crt"
    (root / "libcudart.so").symlink_to(packages / "lib/libcudart.so.13")
    for driver in Path("/usr").glob("lib*/**/libcuda.so.1"):
        (root / "libcuda.so").symlink_to(driver)
        break
    for name, place in {"CPATH": packages / "include", "LIBRARY_PATH": root}.items():
        os.environ[name] = os.pathsep.join(filter(None, [str(place), os.environ.get(name)]))
    return ""


def describe(path: Path, gpu: dict) -> Path:
    """Write the second machine's description of itself, for the first machine; return ``path``."""
    with path.open("w") as file:
        command = [sys.executable, "-W", "ignore", "-m", "s3cache", "target"]
        subprocess.run(command, env={**os.environ, **gpu}, stdout=file, check=True)
    return path


def entries_in(store: Path) -> set[str]:
    """Return the keys of whole graphs in the store."""
    headers = (entry.header for entry in frames(store))
    return {header.key for header in headers if header.kind == "aot"}


def looked_up(local: Path) -> tuple[set[str], set[str]]:
    """Return the keys of whole graphs that hit, and that only missed, on a machine."""
    from s3cache.records import recorded

    found = [each for run in recorded([str(local)]) for each in run.records if each.kind == "aot"]
    hit = {each.key for each in found if each.outcome == "hit"}
    return hit, {each.key for each in found if each.outcome == "miss"} - hit


def run(
    place: Path, shared: Path, names: list[str], gpu: dict, left_s: float, before: list[str] = ()
) -> dict:
    """Run all jobs in one process, on a machine with nothing in ``place``; return its results."""
    environment = {name: value for name, value in os.environ.items() if "S3CACHE" not in name}
    for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "S3CACHE_LOCAL_DIR"):
        environment[name] = str(place / name.lower())
        (place / name.lower()).mkdir(parents=True)
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME"):
        environment.pop(name, None)
    environment |= {"S3CACHE_URL": f"file://{shared / 'store'}", "S3CACHE_STRICT": "yes"}
    # Recall has not run on a GPU yet: REHEARSAL_RECALL=on tries it.
    environment["S3CACHE_RECALL"] = os.environ.get("REHEARSAL_RECALL", "off")
    environment |= {**counted_assemblers(place), **gpu}
    if gpu or before:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    command = [sys.executable, *before, "-W", "ignore", __file__, "--job", str(shared)]
    command += [part for name in names for part in ("--only", name)]
    out = shared / f"{place.name}.json"
    environment["REHEARSAL_OUT"] = str(out)
    try:
        ended = subprocess.run(command, env=environment, timeout=max(left_s, 1), check=False)
        fault = f"the process ended with {ended.returncode}" if ended.returncode else ""
    except subprocess.TimeoutExpired:
        fault = f"not done within {LIMIT_S:.0f} s"
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        results.setdefault(name, {"error": fault or "no result"})
    return results


def counted_assemblers(place: Path) -> dict[str, str]:
    """Put a script that counts runs before each of Triton's assemblers; return its variables."""
    spec = find_spec("triton")
    binaries = Path(spec.origin).parent / "backends/nvidia/bin"
    environment = {"REHEARSAL_LOG": str(place / "assembled")}
    for name in ("ptxas", "ptxas-blackwell"):
        variable = f"TRITON_{name.replace('-', '_').upper()}_PATH"
        real = os.environ.get(variable) or str(binaries / name)
        script = place / name
        script.write_text(
            '#!/bin/sh\ncase "$*" in *--version*) ;; *) echo >>"$REHEARSAL_LOG";; esac\n'
            f'exec {real} "$@"\n'
        )
        script.chmod(0o755)
        environment[variable] = str(script)
    return environment


def names_of(place: Path, store: Path) -> list[str]:
    """Return the places where an entry of a graph names a directory of its machine or its Python.

    Triton's own libraries name files of Triton.
    """
    found = []
    for entry in frames(store):
        for section in entry.names if entry.header.kind in ("aot", "fx") else ():
            content = bytes(entry.section(section))
            for word in {str(place), sys.prefix, str(Path(find_spec("torch").origin).parent)}:
                at = content.find(word.encode())
                if at >= 0:
                    found.append(f"{section}: {content[max(at - 60, 0) : at + 120]!r}")
    return found


def frames(store: Path):
    """Yield all entries, decoded."""
    from s3cache import frame

    for path in store.rglob("*"):
        with suppress(Exception):  # not an entry
            yield frame.decode(path.read_bytes())


def judge(first: dict, second: dict, *, compared: bool, sealed: bool) -> list[str]:
    """Return the faults of a job."""
    faults = [
        f"on the {name} machine: {job['error']}"
        for name, job in (("first", first), ("second", second))
        if "error" in job
    ]
    if faults:
        return faults
    if not first["assembled"]:
        faults.append("the first machine assembled nothing, so this shows nothing")
    # torch may look a graph up, trace it again and look that one up: count what it compiled.
    if not first["compiled"]:
        faults.append("the first machine compiled no graph, so this shows nothing")
    if not second["hits"] or second["compiled"]:
        what = f"{second['hits']} hits, {second['compiled']} graphs compiled"
        faults.append(f"{what} ({second['reasons']})")
    if second["assembled"]:
        faults.append(f"ptxas ran {second['assembled']} times on the second machine")
    if sealed and second["left"]:
        faults.append(f"the second machine has to measure {second['left']}")
    if compared and not second["same"]:
        faults.append(f"numbers differ: {second['differs']}")
    return faults


def show(report: dict) -> None:
    versions = f"torch {report['torch']}, Triton {report['triton']}"
    print(f"{report['device']}, {versions}, {report['seconds']} s")
    title = f"{'job':34}{'ptxas':>12}{'benchmarks':>12}{'hits':>6}{'compiled':>10}"
    print(f"{title}{'first step, s':>18}{'equal':>8}")
    for name, machines in report["jobs"].items():
        first, second = machines["first"], machines["second"]
        if "error" in first or "error" in second:
            print(f"{name:34}  error")
            continue
        steps = f"{first['first_s']:.1f}, {second['first_s']:.1f}"
        ptxas = f"{first['assembled']}, {second['assembled']}"
        same = "-" if report["device"] == "stand-in" else str(second["same"])
        measured = f"{first['benchmarks']}, {second['benchmarks']}".replace("None", "-")
        counts = f"{ptxas:>12}{measured:>12}{second['hits']:>6}{second['compiled']:>10}"
        print(f"{name:34}{counts}{steps:>18}{same:>8}")
    print(
        "keys of whole graphs: {saved} saved, {hit} hit, {missed} missed".format(**report["keys"])
    )
    for fault in report["faults"]:
        print(f"failed: {fault}")
    if not report["faults"]:
        apart = ", except jobs that measure or search on the GPU"
        print(f"passed: each job hits, and needs no ptxas{apart if report['warm'] else ''}")


# -- on each machine


def work(shared: Path, names: list[str]) -> None:
    """Run the jobs in this process; write each result as soon as it is known."""
    import torch
    from torch._dynamo.utils import counters

    import s3cache

    cache = s3cache.enable()
    benchmarks = noted_benchmarks()
    out = Path(os.environ["REHEARSAL_OUT"])
    results = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in names:
        torch._dynamo.reset()
        counters.clear()
        before, reasons = assembled(), dict(cache.stats().misses)
        earlier = len(cache.engine.recorded().records)
        if benchmarks:
            benchmarks.clear()
        try:
            numbers, first_s = train(*JOBS[name])
            results[name] = {
                "first_s": first_s,
                "assembled": assembled() - before,
                "benchmarks": None if benchmarks is None else len(benchmarks),
                "hits": counters["aot_autograd"]["autograd_cache_hit"],
                "compiled": counters["inductor"]["fxgraph_cache_miss"],
                "recall": dict(cache.stats().features["recall"]),
                "left": [
                    each for at in cache.engine.recorded().records[earlier:] for each in at.left
                ],
                "reasons": {
                    str(reason): count - reasons.get(reason, 0)
                    for reason, count in cache.stats().misses.items()
                    if count != reasons.get(reason, 0)
                },
                **compare(numbers, shared / f"{list(JOBS).index(name)}.pt"),
            }
        except Exception as exc:  # noqa: BLE001 - the table shows it, and the next job runs
            results[name] = {"error": f"{type(exc).__name__}: {exc}"[:2000]}
        out.write_text(json.dumps(results))
    cache.flush(60)


def noted_benchmarks() -> list | None:
    """Return a list that grows when torch measures a kernel; None before Python 3.12.

    torch counts measurements too, but a hit adds those of the graph's compile.
    """
    if not hasattr(sys, "monitoring"):
        return None
    from torch._inductor.runtime.benchmarking import benchmarker

    found = []
    sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "rehearsal")
    event = sys.monitoring.events.PY_START
    code = inspect.unwrap(type(benchmarker).benchmark_gpu).__code__
    sys.monitoring.set_local_events(sys.monitoring.PROFILER_ID, code, event)
    sys.monitoring.register_callback(
        sys.monitoring.PROFILER_ID, event, lambda code, _: found.append(code)
    )
    return found


def assembled() -> int:
    log = Path(os.environ["REHEARSAL_LOG"])
    return len(log.read_text()) if log.exists() else 0


def train(model: str, dtype: str, options: dict) -> tuple[list, float]:
    """Run two steps; return losses and gradients, and the seconds of the first step."""
    import torch

    torch.manual_seed(0)
    step = MODELS[model](getattr(torch, dtype))
    compiled = torch.compile(step.forward, **options)
    numbers, sizes = [], (16, 24) if options.get("dynamic") else (16, 16)
    started = time.perf_counter()
    for count in sizes:
        torch.compiler.cudagraph_mark_step_begin()
        inputs = step.inputs(count)
        loss = compiled(*inputs).float().mean()
        leaves = [each for each in (*inputs, *step.parameters) if each.requires_grad]
        grads = torch.autograd.grad(loss, leaves) if leaves else ()
        numbers += [each.detach().cpu().clone() for each in (loss, *grads)]
        if len(numbers) == 1 + len(grads):
            torch.cuda.synchronize()
            first_s = time.perf_counter() - started
    return numbers, round(first_s, 2)


def compare(numbers: list, path: Path) -> dict:
    """Compare with the numbers of the first machine, which saves its own."""
    import torch

    if not path.exists():
        torch.save(numbers, path)
        return {}
    try:  # the second may choose another configuration, which adds in another order
        torch.testing.assert_close(numbers, torch.load(path))
    except AssertionError as exc:
        return {"same": False, "differs": str(exc)[:500]}
    return {"same": True}


class Step:
    """A module or function, with inputs for a batch."""

    def __init__(self, forward, inputs) -> None:
        self.forward = forward
        self.inputs = inputs
        self.parameters = list(getattr(forward, "parameters", list)())


def mlp(dtype) -> Step:
    import torch
    from torch import nn

    layers = nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)
    module = nn.Sequential(*layers).to("cuda", dtype)
    return Step(module, lambda count: (torch.randn(count, 64, device="cuda", dtype=dtype),))


def gpt(dtype) -> Step:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, width = x.shape
            shape = batch, length, 3, self.heads, width // self.heads
            q, k, v = self.mix(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(1000, 128), nn.Embedding(64, 128)
            self.blocks = nn.Sequential(*(Block(128, 4) for _ in range(2)))
            self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 1000)

        def forward(self, tokens, expected):
            x = self.tokens(tokens) + self.places.weight
            logits = self.head(self.norm(self.blocks(x)))
            return functional.cross_entropy(logits.flatten(0, 1), expected.flatten())

    def inputs(count: int):
        made = torch.arange(count * 64).reshape(count, 64) * 7 % 1000
        return made.to("cuda"), made.roll(-1, 1).to("cuda")

    return Step(Model().to("cuda", dtype), inputs)


def softmax(dtype) -> Step:
    import torch

    def forward(x):
        return torch.nn.functional.gelu(x).softmax(-1).square()

    def inputs(count: int):
        x = torch.randn(count * 64, 4096, device="cuda", dtype=dtype)
        return (x.requires_grad_(),)

    return Step(forward, inputs)


def flex(dtype) -> Step:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    def nearer_counts_more(score, _batch, _head, at, other):
        return score - 0.1 * (at - other).abs()

    def forward(q, k, v):
        return flex_attention(q, k, v, score_mod=nearer_counts_more)

    def inputs(count: int):
        made = torch.randn(3, count, 4, 128, 64, device="cuda", dtype=dtype)
        return tuple(each.clone().requires_grad_() for each in made)

    return Step(forward, inputs)


@triton.jit
def weighted_sum(a, b, out, count, BLOCK: tl.constexpr):  # noqa: N803 - as Triton's users write it
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(a + at, mask=inside) + 2 * tl.load(b + at, mask=inside), mask=inside)


def user(dtype) -> Step:
    import torch

    def forward(a, b):
        out = torch.empty_like(a)
        weighted_sum[(triton.cdiv(a.numel(), 256),)](a, b, out, a.numel(), BLOCK=256)
        return (out * 2).relu()

    def inputs(count: int):
        a, b = torch.randn(2, count * 64, device="cuda", dtype=dtype)
        return a, b

    return Step(forward, inputs)


MODELS = {"mlp": mlp, "gpt": gpt, "softmax": softmax, "flex": flex, "user": user}

if __name__ == "__main__":
    sys.exit(main())
