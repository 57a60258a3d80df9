"""An entry says what it is and does, to a reader that has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machines import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(300)

# torch must not even be found, and nothing may be unpickled.
_READER = """
import json, pickle, sys
sys.modules["torch"] = None
def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError("unpickled " + repr(arguments))
sys.addaudithook(refuse)
from s3cache import frame
found = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        entry = frame.decode(file.read())
    header = entry.header
    found.append({"kind": header.kind, "names": entry.names, "variant": header.variant,
                  "producer": header.producer, **header.meta})
print(json.dumps(found))
"""


@pytest.fixture
def described(site: Site, written: Callable[..., tuple[Site, Any]]) -> dict[str, Any]:
    """The headers of some entries, by the graph they are of."""
    objects = site.machine("one").run("views:views", site.url)
    objects.pop("stderr")
    trained, _ = written("train", TORCHINDUCTOR_VEC_ISA_OK="")
    objects["kernel"] = str(trained.entries()[0])
    done = subprocess.run(
        [sys.executable, "-c", _READER, *objects.values()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(objects, json.loads(done.stdout), strict=True))


def test_an_entry_can_be_read_without_torch(described: dict[str, Any]) -> None:
    """Kinds of outputs, mutations, subclasses, guards, times, and what the key is made of."""
    for name, each in described.items():
        assert each["kind"] == "aot", name
        assert len(each["times_ns"]) == 2
        assert each["times_ns"][0] > 0
        assert each["components"]["torch.version"][1].startswith("2.")
        assert all(len(digest) == 32 for digest, _ in each["components"].values())
        made_by = each["made_by"]
        assert made_by["torch"] == each["components"]["torch.version"][1]
        assert made_by["platform"]
        assert "/" not in made_by.get("compiler", "")

    kinds = {
        name: [output["output_type"] for output in each["runtime"]["outputs"]]
        for name, each in described.items()
    }
    assert kinds["views"] == ["non_alias", "alias_of_input"]
    assert described["views"]["runtime"]["outputs"][1]["base_idx"] == 0
    assert kinds["intermediate"] == [
        "alias_of_intermediate_save_as_output",
        "alias_of_intermediate",
    ]
    assert described["intermediate"]["runtime"]["num_intermediate_bases"] == 1

    mutated, kept = described["mutation"]["runtime"]["inputs"]
    assert mutated["mutates_data"]
    assert mutated["mutation_type"] in ("MUTATED_IN_GRAPH", "MUTATED_OUT_GRAPH")
    assert not kept["mutates_data"]
    assert kept["mutation_type"] == "NOT_MUTATED"

    subclass = described["subclass"]["runtime"]["subclasses"]["inputs"][0]
    assert subclass["type"].endswith(".TwoTensor")
    assert subclass["attrs"]["a"]["type"] == subclass["attrs"]["b"]["type"] == "plain"

    training = described["training"]
    assert training["runtime"]["has_backward"]
    assert training["times_ns"][1] > 0
    assert not described["views"]["runtime"]["has_backward"]
    assert described["dynamic"]["guards"]
    assert described["dynamic"]["variant"]
    assert described["dynamic"]["runtime"]["outputs"][0]["dynamic_dims"] == [0]
    assert any(name.startswith("kernel/") for name in described["kernel"]["names"])
    assert described["kernel"]["made_by"]["compiler"]
    assert "compiler" not in described["training"]["made_by"]
