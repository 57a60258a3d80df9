"""A hit never narrows a program: it installs no guard that the program's own compile would not.

``python -m tests.equal "sizes aot" "sizes fx" "sizes recall"`` judges hundreds of pairs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from s3cache import entries, frame
from s3cache.frame import Frame
from s3cache.store import open_store
from tests.hooks.jobs import machine_here
from tests.support.caching import existing
from tests.support.machines import Machine


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what each job found; one process runs them all."""
    root = tmp_path_factory.mktemp("machine")
    return Machine(root).run(f"{__name__}:_found", str(root), server=0).result


def _found(root: str) -> dict[str, Any]:
    jobs = {"sizes": _sizes_inside, "error": _fails_then_works, "recache": _replaced}
    return {name: job(f"file://{root}/{name}?create=1") for name, job in jobs.items()}


def _sizes_inside(url: str) -> list[int]:
    """Compile a branch on a size that only a tensor subclass holds; return hits and misses."""

    def branch(x: Any) -> Any:
        if x.values().shape[0] < 40:
            pass
        return x * 2

    def jagged(*lengths: int) -> Any:
        rows = [torch.ones(length, 4) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    found: list[int] = []
    for name, lengths in (("short", (3, 5)), ("long", (30, 55)), ("longer", (40, 50))):
        with machine_here(url, name) as cache:
            torch.compile(branch, dynamic=True)(jagged(*lengths))
            cache.flush(30)
            found.append(sum(cache.stats().hits.values()))
    return found


def test_knowledge_of_sizes_inside_a_subclass_is_in_the_key(found: Any) -> None:
    """Both branches have one graph: machines that take the same branch share it, others do not."""
    assert found["sizes"] == [0, 0, 1]


# -- a compile that ends in an error


def _fails_then_works(url: str) -> list[Any]:
    """Compile a frame that Dynamo rejects, then one that it accepts; return what is kept."""

    def bounded(x: Any) -> Any:
        if x.size(0) < 10:
            pass
        return x @ x.t()

    def free(x: Any) -> Any:
        return x @ x.t()

    found: list[Any] = []
    for name, function in (("rejected", bounded), ("accepted", free)):
        with machine_here(url, name) as cache:
            x = torch.ones(5, 4)
            torch._dynamo.mark_dynamic(x, 0, min=3, max=10)
            try:
                torch.compile(function)(x)
                error = ""
            except Exception as exc:
                error = type(exc).__name__
            cache.flush(30)
            found.append([error, cache.stats().saved])
    return found


def test_a_compile_that_ends_in_an_error_is_not_saved(found: Any) -> None:
    """Dynamo checks the bounds of sizes after the backend has compiled the graph."""
    assert found["error"] == [["ConstraintViolationError", 0], ["", 1]]


# -- recache


def _replaced(url: str) -> list[Any]:
    """Plant a variant that fits, compile again with ``recache``; return variants and hits."""

    def sliced(x: Any) -> Any:
        return x[:, :3] @ x[:3, :]

    async def variants(*, plant: bool) -> list[bool]:
        """Return for each entry of a whole graph whether it was planted."""
        async with contextlib.aclosing(open_store(url)) as store:
            there = []
            async for info in store.list(entries.NAMES):
                data = await store.get(info.key)
                assert data is not None
                entry = entries.verify(info.key, data)
                if entry.header.kind != "aot":
                    continue
                there.append("planted" in entry.header.meta)
                if plant:
                    await store.put(info.key, _planted(entry))
            return there

    found: list[Any] = []
    for name, recache, columns in (
        ("one", False, 8),
        ("two", True, 8),
        ("three", False, 9),
        ("four", True, 3),
        ("five", False, 8),
    ):
        with machine_here(url, name, recache=recache, **existing(job_profiles=False)) as cache:
            torch.compile(sliced, dynamic=True)(torch.ones(11, columns))
            cache.flush(30)
            hits = sum(cache.stats().hits.values())
        found.append([hits, asyncio.run(variants(plant=name == "one"))])
    return found


def _planted(entry: Frame) -> bytes:
    """Return an entry with other guards, which hold here too."""
    header = entry.header
    return frame.encode(
        kind=header.kind,
        key=header.key,
        variant="other",
        schema=header.schema,
        sections={name: bytes(entry.section(name)) for name in entry.names},
        meta={**header.meta, "planted": True},
    )


def test_recache_replaces_every_variant_that_would_be_used(found: Any) -> None:
    """Other machines use the new entry. One for other sizes stays beside it."""
    assert found["recache"] == [
        [0, [False]],  # and then it is planted
        [0, [False, False]],
        [1, [False, False]],
        [0, [False, False, False]],
        [1, [False, False, False]],
    ]
