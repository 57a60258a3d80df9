"""List the files of s3cache that run for a miss, for a hit from the remote, and for recall.

Fresh machines (processes with their own home and caches) share a directory. Each compiles and runs
one small training step; the second hits the entry that the first has saved. Both run without
recall, as torch traces a frame before it looks a graph up. The last machine recalls the frame that
one before it has traced, and hits the graph in it. A file counts if one of its functions runs, on
any thread, from the call of the compiled function to the end of its backward, or for the miss to
the end of the upload. So does each pair of files if one calls the other. torch's compiler is
imported before, so that turning the cache on does not count.

Fewer files are not better by themselves, but a reader who follows a hit has to open all of them.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3cache.testing import Machine

if TYPE_CHECKING:
    from types import CodeType, FrameType

__all__ = ["Route", "Stop", "routes"]

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = str(_ROOT / "s3cache") + os.sep


@dataclass(frozen=True)
class Stop:
    """A file, its function that was called first, and the thread of that call."""

    file: str
    function: str
    thread: str


@dataclass
class Route:
    """Files in the order of their first calls, and pairs of calling and called file."""

    stops: list[Stop] = field(default_factory=list)
    edges: set[tuple[str, str]] = field(default_factory=set)

    def __str__(self) -> str:
        lines = [f"{len(self.stops)} files, {len(self.edges)} calls from one to another"]
        for number, stop in enumerate(self.stops, 1):
            lines.append(f"{number:4}. {stop.file:28} {stop.function} ({stop.thread})")
        return "\n".join(lines)


class Recorder:
    """Records calls on the thread that starts it, and on threads that it starts."""

    def __init__(self) -> None:
        self.route = Route()
        self.on = False
        self._seen: set[str] = set()
        threading.setprofile(self._called)

    def start(self) -> None:
        """Record from now on. Until then, this thread is not slowed down."""
        self.on = True
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or event != "call" or (file := _file(frame.f_code)) is None:
            return
        if file not in self._seen:
            self._seen.add(file)
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.11
            self.route.stops.append(Stop(file, name, threading.current_thread().name))
        caller = frame.f_back
        while caller is not None and _file(caller.f_code) is None:
            caller = caller.f_back
        other = None if caller is None else _file(caller.f_code)
        if other in self._seen - {file}:  # not what runs this program
            self.route.edges.add((str(other), file))


def _file(code: CodeType) -> str | None:
    """Return a function's file in s3cache; None for other files and for code of imports."""
    if not code.co_filename.startswith(_PACKAGE) or not code.co_flags & inspect.CO_NEWLOCALS:
        return None
    return code.co_filename[len(_PACKAGE) :]


def routes() -> dict[str, Route]:
    """Return the routes of a miss, of a hit from the remote, and of a frame that is recalled."""
    with tempfile.TemporaryDirectory(prefix="s3cache-route-") as root:
        found = {what: _machine(Path(root), what) for what in ("miss", "hit", "trace", "recall")}
    del found["trace"]
    return found


def _machine(root: Path, what: str) -> Route:
    is_recall = what in ("trace", "recall")
    variables = {"PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "ignore"}
    variables |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    variables |= {"S3CACHE_RECALL": "on" if is_recall else "off"}
    # A job profile would fetch the entries of the same program before their lookup.
    variables |= {"S3CACHE_JOB_PROFILES": "0" if is_recall else "1"}
    machine = Machine(root / what, **variables)
    result = machine.call("benchmarks.route:_record", f"file://{root}/remote?create=1", what).result
    stops, edges = result["stops"], result["edges"]
    return Route([Stop(**stop) for stop in stops], {(a, b) for a, b in edges})


def _record(url: str, what: str) -> dict[str, Any]:
    """Run the step on this machine; return its route as JSON."""
    recorder = Recorder()
    # Another option makes another program: no job profile fetches its entry before the lookup.
    sys.argv.append("--recall" if what == "trace" else f"--{what}")
    # No frame is recalled under a profiler. That it runs our functions changes nothing here.
    sys.getprofile = lambda: None

    import s3cache
    from s3cache.features.job_profile import profile

    profile.SETTLED_S = 600.0  # only the flush saves a job profile, even if the machine is busy
    cache = s3cache.enable(url)

    import torch
    import torch._inductor.compile_fx

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    step, batch = torch.compile(model), torch.randn(4, 8)
    cache.flush()  # the remote is open and idle
    while (part := cache.engine.parts.get("job_profile")) is not None and not part.is_known:
        time.sleep(0.01)

    recorder.start()
    step(batch).sum().backward()
    if what in ("miss", "trace"):
        cache.flush()
    recorder.on = False

    stats = cache.stats()
    counts = sum(stats.misses.values()), stats.hits["remote"], stats.features["recall"]["recalled"]
    # The graph of a frame has the key of the same graph in any program: `trace` hits.
    assert counts == _COUNTS[what], stats
    return {**asdict(recorder.route), "edges": sorted(recorder.route.edges)}


# Misses, hits from the remote, and recalled frames.
_COUNTS = {"miss": (1, 0, 0), "hit": (0, 1, 0), "trace": (0, 1, 0), "recall": (0, 1, 1)}


if __name__ == "__main__":
    for _what, _route in routes().items():
        print(f"{_what}: {_route}")
