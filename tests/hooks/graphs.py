"""Jobs over a handful of graphs, one to each kind of damage an entry can have."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3cache import frame
from tests.hooks.jobs import account
from tests.hooks.switches import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

KERNELS = ("cut short", "no symbol", "no kernel")
ENTRIES = ("no pickle", "another type", "raises", "bad guards", "bad backward")


def compile_one(name: str) -> bool:
    """Compile the graph that ``name`` stands for anew; whether it does as eager does."""
    import torch

    if name not in KERNELS:
        return compiled(4 + ENTRIES.index(name), grad=True)
    torch._dynamo.reset()
    number = KERNELS.index(name)
    x = torch.arange(20.0)

    def function(x: Any) -> Any:
        return x.sin() + number

    return torch.allclose(torch.compile(function)(x), function(x))


def all_of_them(url: str) -> dict[str, Any]:
    """Every graph, and the object that each one's entry is in."""
    import s3cache

    remote = Path(url.removeprefix("file://").partition("?")[0]) / "objects"
    objects: dict[str, str] = {}
    with s3cache.enabled(url) as cache:
        wrong = []
        for name in (*KERNELS, *ENTRIES):
            if not compile_one(name):
                wrong.append(name)
            cache.flush()
            for path in remote.rglob("*.*"):
                objects.setdefault(str(path), name)
        return {**account(cache), "wrong": wrong, "objects": objects}


class _Raises:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return int, ("not a number",)


def damage(objects: dict[str, str]) -> None:
    """Make each entry unusable in its own way, in a frame that is sound."""
    for path, name in objects.items():
        found = frame.decode(Path(path).read_bytes())
        sections = {each: bytes(found.section(each)) for each in found.names}
        kernel = next((each for each in sections if each.startswith("kernel/")), "")
        if name == "cut short":
            sections[kernel] = sections[kernel][:4200]  # in the middle of what is loaded
        elif name == "no symbol":
            import _json  # a sound library, but no kernel

            sections[kernel] = Path(_json.__file__).read_bytes()
        elif name == "no kernel":
            del sections[kernel]
        else:
            sections["entry"] = _damaged(name, sections["entry"])
        Path(path).write_bytes(encoded(found, sections))


def _damaged(name: str, content: bytes) -> bytes:
    if name == "no pickle":
        return b"\x80\x04 is no pickle"
    if name == "another type":
        return pickle.dumps({"compiled_fw": None})
    if name == "raises":
        return pickle.dumps(_Raises())
    entry = pickle.loads(content)
    if name == "bad guards":
        entry.guards_expr = "L['nothing'"
    else:
        # The forward is rebuilt by then.
        entry.compiled_bw.result.cache_key = "c" + "0" * 51
        entry.compiled_bw.result.source_code = "raise RuntimeError('this is no graph')"
    return pickle.dumps(entry)


def encoded(found: frame.Frame, sections: dict[str, bytes]) -> bytes:
    header = found.header
    return frame.encode(
        kind=header.kind,
        key=header.key,
        variant=header.variant,
        schema=header.schema,
        sections=sections,
        meta=dict(header.meta),
    )


def write_and_damage(url: str) -> dict[str, Any]:
    found = all_of_them(url)
    damage(found["objects"])
    return found
