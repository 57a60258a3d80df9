"""A machine starts with the sizes of a program that an earlier machine has seen."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import s3cache
from s3cache import frame
from tests.hooks.jobs import machine_here
from tests.support.forging import encoded
from tests.support.marks import nightly, slow
from tests.support.sites import Machine, Site
from tests.support.watch import lowerings, processes

pytestmark = pytest.mark.timeout(900)


def learner(site: Site, name: str) -> Machine:
    return site.machine(name, S3CACHE_SHAPE_PROFILE="1")


def run(
    site: Site, name: str, *seen: tuple[str, list[int], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Run fresh machines, all in one process; return their counts."""
    found: dict[str, dict[str, Any]] = site.machine(name).run(
        "test_profiles:machines", site.url, seen
    )
    assert found.pop("stderr") is not None
    assert all(each["worst"] < 1e-5 for each in found.values())
    return found


def profiles(site: Site) -> list[Path]:
    kinds = {path: frame.decode(path.read_bytes()).header.kind for path in site.entries()}
    return [path for path, kind in kinds.items() if kind == "shapes"]


@slow
def test_a_profile_avoids_compiles_and_a_damaged_one_is_ignored(site: Site) -> None:
    found = run(
        site,
        "one",
        ("first", [8, 12], {}),
        ("second", [16], {}),
        ("steady", [8, 8], {}),
        ("both", [8, 12], {}),
        ("others", [16, 20], {}),
        ("static", [8], {"dynamic": False}),
    )
    assert found["first"]["lowered"] == 4  # forward and backward, for one size and for all sizes
    # A first batch of another size hits the graph for all sizes, and the profile stays the same.
    second = found["second"]
    assert (second["lowered"], second["started"], second["saved"]) == (0, 0, 0)
    assert (second["hits"], second["misses"]) == (1, 0)
    # One graph serves all sizes. A program that asks for constants hits the graph for its size.
    for name in ("steady", "both", "others", "static"):
        each = found[name]
        assert (each["lowered"], each["started"], each["hits"]) == (0, 0, 1), name

    # With an unusable profile, a machine compiles as without one.
    (path,) = profiles(site)
    path.write_bytes(encoded(frame.decode(path.read_bytes()), {"profile": b"no profile"}))
    found = run(site, "two", ("third", [24], {}), ("off", [32, 20], {"profile": False}))
    third, off = found["third"], found["off"]
    assert (third["lowered"], third["hits"], third["misses"]) == (2, 0, 1)
    # Without a profile, there is a graph for one size first.
    assert (off["lowered"], off["hits"], off["misses"]) == (2, 1, 1)


@nightly
def test_profiles_of_other_jobs_break_no_program(site: Site) -> None:
    """Code that needs constants compiles in whole graphs, as it does without s3cache."""
    # This job sees two values of each number, and two sizes of each tensor.
    learner(site, "first").run("test_profiles:needs_constants", site.url, [5, 6], False)
    assert profiles(site)

    # Numbers are in no profile, even if profiles are used.
    numbers = learner(site, "numbers").run(
        "test_profiles:needs_constants", site.url, [7], True, False
    )
    assert numbers["failed"] == {}

    # Sizes are, so profiles are not used by default.
    default = site.machine("default").run("test_profiles:needs_constants", site.url, [7])
    assert default["failed"] == {}


# -- the job


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def _difference(model: Any, compiled: Any, batch: int) -> float:
    """Return the largest difference of one step's results and gradients from eager mode."""
    torch.manual_seed(batch)
    data, found = torch.randn(batch, 4), []
    for forward in (model, compiled):
        model.zero_grad()
        out = forward(data)
        out.square().mean().backward()
        found.append([out.detach(), *(each.grad for each in model.parameters())])
    pairs = zip(*found, strict=True)
    return max(float((eager - ours).abs().max()) for eager, ours in pairs)


def machines(url: str, seen: list[tuple[str, list[int], dict[str, Any]]]) -> dict[str, Any]:
    """Train on fresh machines with batches of these sizes; return their counts by name."""
    found, lowered, started = {}, lowerings(), processes()
    for name, batches, options in seen:
        with machine_here(url, name, shape_profile=options.pop("profile", True)) as cache:
            lowered.clear()
            started.clear()
            model = _model()
            compiled = torch.compile(model, **options)
            worst = max(_difference(model, compiled, batch) for batch in batches)
            cache.flush()
            stats = cache.stats()
        found[name] = {
            "worst": worst,
            "lowered": len(lowered),
            "started": len(started),
            "hits": sum(stats.hits.values()),
            "misses": sum(stats.misses.values()),
            "saved": stats.saved,
        }
    return found


def needs_constants(
    url: str, values: list[int], fullgraph: bool = True, sizes: bool = True
) -> dict[str, dict[str, str]]:
    """Compile functions that need constants, of numbers and of sizes; return the failures."""
    import torch._inductor.compile_fx  # s3cache begins with it

    def of_size(of_number: Any) -> Any:
        return lambda x: of_number(x, x.shape[0])

    asks = {
        "gcd": lambda x, n: x + math.gcd(n, 4),
        "comb": lambda x, n: x + math.comb(n, 2),
        "str": lambda x, n: x + len(str(n)),
        "pow": lambda x, n: x + pow(n, 2, 3),
        "pack": lambda x, n: x + len(struct.pack("i", n)),
    }

    def begin(x: Any) -> Any:
        return x + 1

    failed = {}
    with s3cache.enabled(url) as cache:
        torch.compile(begin, backend="eager")(torch.ones(2))  # it names the program
        for name, ask in asks.items():
            for of in ("a number", "a size")[: 1 + sizes]:
                torch._dynamo.reset()
                function = ask if of == "a number" else of_size(ask)
                compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
                for value in values:
                    given = (torch.ones(3), value) if of == "a number" else (torch.ones(value),)
                    try:
                        assert torch.equal(compiled(*given), function(*given))
                    except Exception as error:
                        failed[f"{name} of {of}"] = repr(error)[:200]
        cache.flush()
    return {"failed": failed}
