"""What one machine learned of a program's sizes, the next one starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from s3cache import frame
from tests.support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)


def learner(site: Site, name: str) -> Machine:
    return site.machine(name, S3CACHE_SHAPE_PROFILE="1")


def run(
    site: Site, name: str, *batches: int, profile: bool = True, **options: Any
) -> dict[str, Any]:
    machine = learner(site, name) if profile else site.machine(name)
    found: dict[str, Any] = machine.run("dynamic_batches:steps", site.url, batches, options)
    assert found["worst"] < 1e-5
    return found


def profiles(site: Site) -> list[Path]:
    kinds = {path: frame.decode(path.read_bytes()).header.kind for path in site.entries()}
    return [path for path, kind in kinds.items() if kind == "shapes"]


@slow
def test_a_first_batch_of_another_size_hits_what_serves_every_size(site: Site) -> None:
    first = run(site, "first", 8, 12)
    assert first["lowered"] == 4  # forward and backward, of one size and of all
    assert len(profiles(site)) == 1

    second = run(site, "second", 16)
    assert (second["lowered"], second["started"]) == (0, 0)
    assert (second["hits"], second["misses"]) == (1, 0)
    assert second["saved"] == 0  # it learned nothing new


@slow
def test_what_a_profile_does_and_does_not(site: Site) -> None:
    run(site, "first", 8, 12)
    # Who begins as the first machine did finds what it made: the graph of one size, then of all.
    steady, both = run(site, "steady", 8, 8), run(site, "both", 8, 12)
    assert (steady["lowered"], steady["started"], steady["hits"]) == (0, 0, 1)
    assert (both["lowered"], both["started"], both["hits"]) == (0, 0, 2)

    # Two other sizes have one graph.
    others = run(site, "others", 16, 20)
    assert (others["lowered"], others["hits"]) == (0, 1)

    # Who asks for constants gets them, and what is there of them.
    static = run(site, "static", 8, dynamic=False)
    assert (static["lowered"], static["hits"]) == (0, 1)

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
    third = run(site, "third", 24)
    assert (third["lowered"], third["hits"], third["misses"]) == (2, 0, 1)

    # Without it there is another graph before.
    off = run(site, "off", 32, 20, profile=False)
    assert (off["lowered"], off["hits"], off["misses"]) == (2, 1, 1)


@slow
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
