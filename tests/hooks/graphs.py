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
#: The damage to entries of whole graphs and of FX graphs, by the first letter of their keys.
DAMAGE = {
    "a": (*KERNELS, *ENTRIES),
    "f": ("no kernel", "no pickle", "another type", "bad code", "bad guards"),
}


def compile_one(name: str, letter: str) -> bool:
    """Compile the graph for a damage again; return whether it equals eager mode."""
    import torch

    if letter == "a" and name in ENTRIES:
        return compiled(4 + ENTRIES.index(name), grad=True)
    torch._dynamo.reset()
    number = DAMAGE[letter].index(name)
    # The backward of a graph at the second level never runs.
    x = torch.arange(20.0, requires_grad=letter == "f")

    def function(x: Any) -> Any:
        return x.sin() + number

    return torch.allclose(torch.compile(function)(x), function(x))


def remote_of(url: str) -> Path:
    """Return the folder with the objects of a URL."""
    return Path(url.removeprefix("file://").partition("?")[0]) / "objects"


def _compile_all(url: str, name: str, letter: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Compile every graph on a machine; return the counts, and the damage for each object."""
    objects: dict[str, str] = {}
    with machine_here(url, name) as cache:
        wrong = []
        for graph in DAMAGE[letter]:
            if not compile_one(graph, letter):
                wrong.append(graph)
            cache.flush()
            for path in remote_of(url).rglob(f"{letter}*.*"):
                objects.setdefault(str(path), graph)
        fx = cache.stats().fx
        halves = {
            "hits": sum(fx.hits.values()),
            "misses": {str(r): n for r, n in fx.misses.items()},
        }
        return {**account(cache), "wrong": wrong, "fx": {**halves, "saved": fx.saved}}, objects


def damaged_and_replaced(url: str, letter: str) -> dict[str, Any]:
    """Run a writer, a reader of damaged entries, and a reader of their replacements."""
    writer, objects = _compile_all(url, "writer", letter)
    damage(objects)
    bad = {path: Path(path).read_bytes() for path in objects}
    reader, _ = _compile_all(url, "reader", letter)
    replaced = all(Path(path).read_bytes() != content for path, content in bad.items())
    os.environ["PATH"] = ""  # no compiler
    third, _ = _compile_all(url, "third", letter)
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
