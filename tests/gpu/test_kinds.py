"""A graph that was compiled for a GPU is a hit on a machine that has never compiled.

That machine assembles and measures nothing.

One process for each machine runs all kinds. The first machine is removed before the second starts.
The second has another current device.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from s3cache import frame
from s3cache.errors import CorruptError
from tests.support.gpu import standin
from tests.support.machines import remote_url
from tests.support.marks import nightly, selected, slow

pytestmark = pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)

#: Kinds by how often they run: in make test, in make test-slow, and similar ones.
OFTEN = ["training"]
SLOW = [
    *("dynamic shapes", "triton autotune", "split graphs", "triton kernel", "cpp wrapper"),
    *("flex attention", "combo blocks", "coordinate descent", "triton op", "reduce overhead"),
]
SIMILAR = ["inference", "reductions", "combo kernels", "known kernel", "foreach"]
KINDS = [*OFTEN, *SLOW, *SIMILAR]


def _marks(gpu: str, kind: str) -> Any:
    """Return the marks of the tests of a kind: those of an H100 and an MI300X run most often."""
    levels = (
        (gpu != "H100") + (kind in SLOW) + 2 * (kind in SIMILAR) + 2 * (gpu in ("A100", "B200"))
    )
    return ((), slow, *[nightly] * 4)[levels]


EACH_GPU = pytest.mark.parametrize(
    "rehearsal", [pytest.param(gpu, marks=_marks(gpu, "")) for gpu in standin.GPUS], indirect=True
)
EACH_KIND = pytest.mark.parametrize(
    ("rehearsal", "kind"),
    [pytest.param(gpu, kind, marks=_marks(gpu, kind)) for gpu in standin.GPUS for kind in KINDS],
    indirect=["rehearsal"],
)
OTHER = 3
#: Kinds that are traced before the lookup, since code of the program takes part in tracing.
TRACED = {"triton op"}
#: Kinds that are compiled for one device and not moved to another.
KEEPS_DEVICE = {"cpp wrapper"}
#: Kinds that call Triton for kernels again; Triton finds their files.
CALLS_TRITON = {"triton kernel", "triton op", "triton autotune", "cpp wrapper"}
#: Kinds that measure several configurations.
MEASURES = {"training", "triton autotune", "combo blocks", "coordinate descent"}


@dataclass
class Rehearsal:
    """The reports of two machines with GPUs of one kind, and the content of their remote."""

    first: dict[str, Any]
    second: dict[str, Any]
    sections: list[bytes]
    places: list[str]


def _run(root: Path, name: str, kinds: list[str], gpu: str = "H100", index: int = 0) -> Any:
    """Run kinds on a machine; return the reports, and remove the machine."""
    machine = standin.machine(root / name, gpu, index=index, S3CACHE_URL=remote_url(root))
    reports = machine.run("tests.support.gpu.kinds:run", *kinds).result
    shutil.rmtree(machine.root)
    return reports


@pytest.fixture(scope="module")
def rehearsals() -> dict[str, Rehearsal]:
    """Return all rehearsals so far, by GPU."""
    return {}


@pytest.fixture
def rehearsal(
    request: pytest.FixtureRequest,
    rehearsals: dict[str, Rehearsal],
    tmp_path_factory: pytest.TempPathFactory,
) -> Rehearsal:
    gpu = request.param
    if gpu not in rehearsals:
        chosen = selected(request, "kind", rehearsal=gpu)
        kinds = [kind for kind in KINDS if kind in chosen]
        rehearsals[gpu] = _rehearse(tmp_path_factory.mktemp(gpu), gpu, kinds)
    return rehearsals[gpu]


def _rehearse(root: Path, gpu: str, kinds: list[str]) -> Rehearsal:
    first = _run(root, "first", kinds, gpu)
    second = _run(root, "second", kinds, gpu, OTHER)
    sections = []
    for path in filter(Path.is_file, (root / "remote").rglob("*")):
        try:
            entry = frame.decode(path.read_bytes())
        except CorruptError:
            continue  # not an entry
        sections += [bytes(entry.section(name)) for name in entry.names]
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    places = [str(root / "first"), sys.prefix, os.path.dirname(torch.origin), str(standin.TRITON)]
    return Rehearsal(first, second, sections, places)


@EACH_KIND
def test_the_second_machine_assembles_and_measures_nothing(rehearsal: Rehearsal, kind: str) -> None:
    first, second = rehearsal.first[kind], rehearsal.second[kind]
    assert first["ptxas"] > 0
    assert ("benchmark" in first) >= (kind in MEASURES)
    assert first["hits"] == first["fx hits"] == 0
    assert "ptxas" not in second
    assert "benchmark" not in second
    assert "triton.compile" not in second or kind in CALLS_TRITON
    assert (second["fx hits"] if kind in TRACED else second["hits"]) > 0
    assert second["compiled"] == 0


@EACH_KIND
def test_the_second_machine_runs_the_same_code_and_kernels(rehearsal: Rehearsal, kind: str) -> None:
    first, second = rehearsal.first[kind], rehearsal.second[kind]
    assert second["code"]
    # The first machine also generates templates to choose from.
    assert set(second["code"]) <= set(first["code"])
    assert first["launched"] == second["launched"]
    assert first["launched"] or kind == "reduce overhead"
    assert first["devices"] in ([0], [])
    assert second["devices"] in ([0] if kind in KEEPS_DEVICE else [OTHER], [])


@EACH_GPU
def test_no_entry_names_a_directory_of_the_first_machine(rehearsal: Rehearsal) -> None:
    assert rehearsal.sections
    for section in rehearsal.sections:
        for place in rehearsal.places:
            assert place.encode() not in section


@nightly
def test_an_entry_made_on_one_device_equals_a_compile_on_another(tmp_path: Path) -> None:
    kinds = ["training", "flex attention", "coordinate descent"]
    moved = _rehearse(tmp_path / "moved", "H100", kinds).second
    compiled = _run(tmp_path / "compiled", "other", kinds, index=OTHER)
    for kind in kinds:
        assert set(moved[kind]["code"]) <= set(compiled[kind]["code"]), kind
        assert moved[kind]["launched"] == compiled[kind]["launched"], kind


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["training"], marks=slow),
        pytest.param(["combo blocks", "coordinate descent"], marks=nightly),
    ],
)
def test_a_whole_graph_saved_after_second_level_hits_serves_others(
    kinds: list[str], tmp_path: Path
) -> None:
    """The second machine compiles nothing and saves the whole graph; the third machine hits it."""
    reports = []
    for name, whole_graphs in ("first", "0"), ("second", "1"), ("third", "1"):
        machine = standin.machine(tmp_path / name, S3CACHE_URL=remote_url(tmp_path))
        machine.environment["TORCHINDUCTOR_AUTOGRAD_CACHE"] = whole_graphs
        reports.append(machine.run("tests.support.gpu.kinds:run", *kinds).result)
    for kind in kinds:
        first, second, third = (each[kind] for each in reports)
        assert "ptxas" in first
        assert "ptxas" not in second
        assert second["fx hits"] > second["hits"] == 0
        assert third["hits"] > third["fx hits"] == 0
        assert not {"ptxas", "benchmark", "triton.compile"} & third.keys()
        assert third["launched"] == first["launched"]
