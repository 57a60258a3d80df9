"""Jobs with one graph for each kind of damage to an entry."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3cache import frame
from tests.hooks.jobs import account, machine_here
from tests.hooks.switches import compiled
from tests.support.forging import encoded

KERNELS = ("cut short", "no symbol", "no kernel")
ENTRIES = ("no pickle", "another type", "raises", "bad guards", "bad backward")


def compile_one(name: str) -> bool:
    """Compile the graph called ``name`` again; return whether it equals eager mode."""
    import torch

    if name not in KERNELS:
        return compiled(4 + ENTRIES.index(name), grad=True)
    torch._dynamo.reset()
    number = KERNELS.index(name)
    x = torch.arange(20.0)

    def function(x: Any) -> Any:
        return x.sin() + number

    return torch.allclose(torch.compile(function)(x), function(x))


def remote_of(url: str) -> Path:
    """Return the folder with the objects of a URL."""
    return Path(url.removeprefix("file://").partition("?")[0]) / "objects"


def _compile_all(url: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Compile every graph on a machine; return the counts, and the graph of each object."""
    objects: dict[str, str] = {}
    with machine_here(url, name) as cache:
        wrong = []
        for graph in (*KERNELS, *ENTRIES):
            if not compile_one(graph):
                wrong.append(graph)
            cache.flush()
            for path in remote_of(url).rglob("a*.*"):  # whole graphs
                objects.setdefault(str(path), graph)
        return {**account(cache), "wrong": wrong}, objects


def damaged_and_replaced(url: str) -> dict[str, Any]:
    """Run a writer, a reader of damaged entries, and a reader of their replacements."""
    writer, objects = _compile_all(url, "writer")
    damage(objects)
    bad = {path: Path(path).read_bytes() for path in objects}
    reader, _ = _compile_all(url, "reader")
    replaced = all(Path(path).read_bytes() != content for path, content in bad.items())
    os.environ["PATH"] = ""  # no compiler
    third, _ = _compile_all(url, "third")
    return {"writer": writer, "reader": reader, "third": third, "replaced": replaced}


class _Raises:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return int, ("not a number",)


def damage(objects: dict[str, str]) -> None:
    """Damage each entry in its own way, inside a valid frame."""
    for path, name in objects.items():
        found = frame.decode(Path(path).read_bytes())
        sections = {each: bytes(found.section(each)) for each in found.names}
        kernel = next((each for each in sections if each.startswith("kernel/")), "")
        if name == "cut short":
            sections[kernel] = sections[kernel][:4200]  # inside the part that is loaded
        elif name == "no symbol":
            import _json  # a valid library, but no kernel

            sections[kernel] = Path(_json.__file__).read_bytes()
        elif name == "no kernel":
            del sections[kernel]
        else:
            sections["entry"] = _damaged(name, sections["entry"])
        Path(path).write_bytes(encoded(found, sections))


def _damaged(name: str, content: bytes) -> bytes:
    if name == "no pickle":
        return b"\x80\x04 is not a pickle"
    if name == "another type":
        return pickle.dumps({"compiled_fw": None})
    if name == "raises":
        return pickle.dumps(_Raises())
    entry = pickle.loads(content)
    if name == "bad guards":
        entry.guards_expr = "L['nothing'"
    else:  # the backward of a whole graph: the forward is already rebuilt then
        graph = entry.compiled_bw.result if hasattr(entry, "compiled_bw") else entry
        graph.cache_key = "c" + "0" * 51
        graph.source_code = "raise RuntimeError('this is not a graph')"
    return pickle.dumps(entry)
