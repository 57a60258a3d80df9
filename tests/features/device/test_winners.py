"""Entries of graphs with kernels to measure: when they are sealed, and by which machine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from s3cache import frame, testing
from s3cache.testing import ProgramError
from tests.support.gpu import standin
from tests.support.machines import Machine, remote_url
from tests.support.marks import nightly, slow

pytestmark = pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)


KERNEL = "triton_red_fused__softmax_prepare_softmax_online_0", "2 configurations"
CONFIGURATIONS = 2


class Site:
    """Machines with GPUs, and their remote."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def machine(self, name: str, **environment: str) -> Machine:
        machine = standin.machine(self.root / name, S3CACHE_URL=remote_url(self.root))
        machine.environment.update(environment)
        return machine

    def run(self, name: str, *arguments: object, **environment: str) -> dict[str, Any]:
        """Run the program on a machine; return its counts."""
        machine = self.machine(name, **environment)
        counted: dict[str, Any] = machine.run(f"{__name__}:_softmax", *arguments).result
        return counted

    def entry(self) -> Path:
        """Return the file of the only entry of a graph in the remote."""
        kept = []
        for path in filter(Path.is_file, (self.root / "remote").rglob("*.0")):
            if frame.decode(path.read_bytes()).header.kind == "aot":
                kept.append(path)
        (path,) = kept
        return path

    def kernels(self) -> int:
        return bytes(frame.decode(self.entry().read_bytes()).section("entry")).count(b"\x7fELF")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@slow
def test_a_sealed_entry_is_uploaded_once_with_only_the_winner(site: Site) -> None:
    first = site.run("first")
    assert first["measured"] == CONFIGURATIONS
    assert first["uploaded"] == 2, "the whole graph, and its FX graph"
    assert site.kernels() == 1
    assert left_in(site) == []
    second = site.run("second", S3CACHE_ON_MISS="error")
    assert (second["hits"], second["measured"], second["error"]) == (1, 0, "")


@nightly
def test_the_entry_of_a_training_step_has_only_its_winners(site: Site) -> None:
    """The example of docs/gpu.md."""
    first = site.machine("first").run("tests.support.gpu.kinds:run", "training").result["training"]
    assert first["ptxas"] == first["benchmark"] == 12
    assert site.kernels() == 5


@nightly
def test_an_entry_that_was_uploaded_before_it_was_sealed_is_replaced(site: Site) -> None:
    assert site.run("first", "upload")["uploaded"] == 4, "the whole graph and its FX graph, twice"
    assert site.kernels() == 1
    assert left_in(site) == []
    assert site.run("second")["measured"] == 0


@slow
def test_a_machine_seals_an_entry_that_another_left_unsealed_for_long(site: Site) -> None:
    with pytest.raises(ProgramError, match="exit status 7"):
        site.run("first", "die")
    assert site.kernels() == CONFIGURATIONS
    assert left_in(site) == [[*KERNEL]]

    # The first machine may still be measuring.
    second = site.run("second")
    assert (second["hits"], second["measured"]) == (1, CONFIGURATIONS)
    assert left_in(site) == [[*KERNEL]]
    shown = command(site, "second", "report")
    assert f"left to measure: {', '.join(KERNEL)}" in shown

    refused = site.run("third", S3CACHE_ON_MISS="error")
    assert "but a hit has kernels left to measure" in refused["error"]
    assert ": ".join(KERNEL) in refused["error"]

    fourth = site.run("fourth", "", 4000.0)
    assert (fourth["hits"], fourth["measured"], fourth["uploaded"]) == (1, CONFIGURATIONS, 1)
    assert left_in(site) == []
    assert site.run("fifth")["measured"] == 0


def left_in(site: Site) -> object:
    """Return the kernels of the entry that ``s3cache inspect`` lists as left to measure."""
    shown = command(site, "inspecting", "inspect", str(site.entry()), "--json")
    return json.loads(shown)["left"]


def command(site: Site, machine: str, *words: str) -> str:
    """Return what a command prints on a machine."""
    return testing.Machine(site.root / machine).run("-m", "s3cache", *words).stdout


# -- the job


def _softmax(at_first: str = "", later_s: float = 0.0) -> dict[str, Any]:
    """Compile and launch a kernel with two configurations; return the counts.

    Args:
        at_first: the action before the first measurement: ``upload`` all saves, upload them and
            ``die``, or nothing.
        later_s: how far the clock of this machine is ahead.
    """
    standin.install()
    import torch

    import s3cache
    from tests.support.gpu import graphs

    cache, now = s3cache.enable(), time.time
    vars(time)["time"] = lambda: now() + later_s

    def first() -> None:
        if standin.counts["benchmark"] == 1 and at_first:
            assert cache.flush(60).complete
            if at_first == "die":
                os._exit(7)

    standin.before_measuring.append(first)
    error = ""
    with standin.tensors(), torch.device("cuda"):
        try:
            graphs.reductions()
        except Exception as exc:
            error = str(exc)
    assert cache.flush(60).complete
    stats = cache.stats()
    return {
        "measured": standin.counts["benchmark"],
        "hits": sum(stats.hits.values()),
        "uploaded": stats.uploaded,
        "error": error,
    }
