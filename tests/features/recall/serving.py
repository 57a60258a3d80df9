"""Run programs of the table, each in a child of this process that runs no other program.

This process has imported torch and compiled once. A program's changes to torch end with its child,
and a new child costs almost nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._dynamo import convert_frame

import s3cache
from s3cache.features.recall.agreement import Agreement
from s3cache.settings import Mode
from tests.equal.observe import observe
from tests.equal.programs import Compile, eagerly
from tests.support.children import in_child
from tests.support.modules import execute

_TIMEOUT_S = 120

# The frames that were traced in this process. Dynamo's own counter includes frames without tensors,
# such as Python's own that are called while an object is deleted.
_traced: list[str] = []


def serve(url: str, programs: str, wanted: str, jobs: int = 1) -> list[list[Any]]:
    """Run the parts of each program of a file in turn; ``jobs`` programs at a time.

    A part has the program's ``name`` and ``source``, its ``variant`` (A, B, or AB: A that becomes
    B within the process) and ``how`` it runs: ``eager``, or with recall ``off``, ``on`` or
    ``check``. ``save`` is false if the store must not change. Return the results and counts of
    each part (two of AB), or the error that it raised.
    """
    _count_traces()
    # The comparison of the frame must find each change alone. Here every program is another one.
    Agreement.other_program = lambda *_: ""  # type: ignore[method-assign]
    prepare_forks()
    _traced.clear()

    def in_turn(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [_in_child(url, programs, part) for part in parts]

    with ThreadPoolExecutor(jobs) as pool:
        return [*pool.map(in_turn, json.loads(Path(wanted).read_text(encoding="utf-8")))]


def prepare_forks() -> None:
    """Let s3cache inspect torch, which it does once in a process: forks inherit the results."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(), s3cache.enabled(local_dir=tempfile.mkdtemp()):
        warnings.simplefilter("ignore")
        weight = torch.ones(2, requires_grad=True)
        torch.compile(lambda a: (a * weight).sum())(torch.ones(2)).backward()
    torch.compiler.reset()


def _count_traces() -> None:
    compile_frame = convert_frame._compile

    @functools.wraps(compile_frame)
    def counted(code: CodeType, *args: Any, **options: Any) -> Any:
        result = compile_frame(code, *args, **options)
        _traced.append(code.co_name)
        return result

    convert_frame._compile = counted


def _in_child(url: str, programs: str, part: Mapping[str, Any]) -> Any:
    log = os.path.join(tempfile.gettempdir(), "log")
    with tempfile.TemporaryDirectory() as place:

        def play() -> list[Any]:
            warnings.simplefilter("ignore")
            return _play(url, Path(programs), part, place)

        result, error = in_child(play, _TIMEOUT_S, log)
    return error or result


def _play(url: str, programs: Path, part: Mapping[str, Any], place: str) -> list[Any]:
    if part["how"] == "eager":
        return [observe(got) for got in _perform(programs, part, eagerly)]
    with _cached(url, part, place) as cache:
        steps = _perform(programs, part, torch.compile)
        return [{"got": observe(got), **_counts(cache)} for got in steps]


@contextlib.contextmanager
def _cached(url: str, part: Mapping[str, Any], place: str) -> Iterator[Any]:
    if part["how"] == "precompile":  # torch's own store, which is not safe
        with torch._dynamo.config.patch(caching_precompile=True):
            yield None
            if part["save"]:
                torch.compiler.save_cache_artifacts()
        return
    os.environ["S3CACHE_RECALL"] = part["how"]
    # torch's own key of a graph lacks backward formulas and what a tensor subclass keeps.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{place}/torch"
    mode: Mode = "read-write" if part["save"] else "read-only"
    with s3cache.enabled(url, local_dir=place, mode=mode) as cache:
        assert s3cache.active() is cache
        yield cache
        assert not cache.flush(60).remaining


def _counts(cache: Any) -> dict[str, Any]:
    """Return the counts of recall so far, and the number of frames that Dynamo traced."""
    counts = cache.stats().features["recall"] if hasattr(cache, "stats") else {}
    names = ("recalled", "saved", "agreed", "disagreed")
    found = {name: int(counts.get(name, 0)) for name in names}
    refused = {code: int(n) for code, n in counts.items() if code.startswith("refused:")}
    return {**found, "traced": len(_traced), "refused": refused}


def _perform(programs: Path, part: Mapping[str, Any], compile_it: Compile) -> Iterator[Any]:
    """Yield the result of the program and, for variant AB, its result after the change."""
    torch.manual_seed(0)
    module, variant = load(programs, part), part["variant"]
    change: Any = getattr(module, "change", None)
    if variant == "B" and change is not None:
        change()
    g = compile_it(module.f, **getattr(module, "options", {}))
    runs = getattr(module, "run", lambda g: g(module.x))
    yield runs(g)
    if variant == "AB":
        change()
        yield runs(g)


def load(programs: Path, part: Mapping[str, Any]) -> ModuleType:
    """Write a variant of a program to the program's own folder, and execute it."""
    place = programs / part["name"].replace(" ", "_").replace("/", "-")
    place.mkdir(parents=True, exist_ok=True)
    path = place / "program.py"
    path.write_text(part["source"], encoding="utf-8")
    return execute(path, V=int(part["variant"] == "B"))


def run_file(place: Path, compile_it: Compile) -> Any:
    module = execute(place / "program.py")
    g = compile_it(module.f) if callable(module.f) else None
    return module.run(g)
