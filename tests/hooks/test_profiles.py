"""What one machine learned of a program's sizes, the next one starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from s3cache import frame
from tests.support.marks import nightly, slow

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)


def learner(site: Site, name: str) -> Machine:
    return site.machine(name, S3CACHE_SHAPE_PROFILE="1")


def run(
    site: Site, name: str, *told: tuple[str, list[int], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What machines come to, all in one process: each begins with nothing of its own."""
    found: dict[str, dict[str, Any]] = site.machine(name).run(
        "dynamic_batches:machines", site.url, told
    )
    assert found.pop("stderr") is not None
    assert all(each["worst"] < 1e-5 for each in found.values())
    return found


def profiles(site: Site) -> list[Path]:
    kinds = {path: frame.decode(path.read_bytes()).header.kind for path in site.entries()}
    return [path for path, kind in kinds.items() if kind == "shapes"]


@slow
def test_what_a_profile_does_and_does_not(site: Site) -> None:
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
    assert found["first"]["lowered"] == 4  # forward and backward, of one size and of all
    # A first batch of another size hits what serves every size, and there is nothing new to learn.
    second = found["second"]
    assert (second["lowered"], second["started"], second["saved"]) == (0, 0, 0)
    assert (second["hits"], second["misses"]) == (1, 0)
    # All sizes have one graph. A program that asks for constants gets what is there of them.
    for name in ("steady", "both", "others", "static"):
        each = found[name]
        assert (each["lowered"], each["started"], each["hits"]) == (0, 0, 1), name

    # A profile that cannot be used costs what there was before, and nothing else.
    (path,) = profiles(site)
    header = frame.decode(path.read_bytes()).header
    path.write_bytes(
        frame.encode(
            kind=header.kind,
            key=header.key,
            variant=header.variant,
            schema=header.schema,
            sections={"profile": b"no profile"},
        )
    )
    found = run(site, "two", ("third", [24], {}), ("off", [32, 20], {"profile": False}))
    third, off = found["third"], found["off"]
    assert (third["lowered"], third["hits"], third["misses"]) == (2, 0, 1)
    # Without it there is another graph before.
    assert (off["lowered"], off["hits"], off["misses"]) == (2, 1, 1)


@nightly
def test_what_other_jobs_learned_breaks_no_program(site: Site) -> None:
    """Code that needs constants compiles in whole graphs, as it does without s3cache."""
    # This job sees two values of each number, and two sizes of each tensor.
    learner(site, "first").run("dynamic_batches:needs_constants", site.url, [5, 6], False)
    assert profiles(site)

    # Numbers are in no profile, even where those are used.
    numbers = learner(site, "numbers").run(
        "dynamic_batches:needs_constants", site.url, [7], True, False
    )
    assert numbers["failed"] == {}

    # Of sizes they are, so they are not used until somebody asks for it.
    default = site.machine("default").run("dynamic_batches:needs_constants", site.url, [7])
    assert default["failed"] == {}
