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

pytestmark = pytest.mark.timeout(900)

# torch must not even be found, and nothing may be unpickled.
_READER = """
import json, pickle, sys
sys.modules["torch"] = None
def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError("unpickled " + repr(arguments))
sys.addaudithook(refuse)
from s3cache import frame
from s3cache.artifact import description, to_plain
found = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        entry = frame.decode(file.read())
    header = entry.header
    found.append({"kind": header.kind, "names": entry.names, "variant": header.variant,
                  "producer": header.producer, **header.meta,
                  "runtime": to_plain(description(header))})
print(json.dumps(found, default=repr))
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


def metadata_of(each: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = each["runtime"]["runtime_metadata"]
    return metadata


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
        assert made_by["device"] == "cpu"
        assert "/" not in made_by.get("compiler", "")

    kinds = {
        name: [output["output_type"] for output in metadata_of(each)["output_info"]]
        for name, each in described.items()
    }
    assert kinds["views"] == ["non_alias", "alias_of_input"]
    assert metadata_of(described["views"])["output_info"][1]["base_idx"] == 0
    assert kinds["intermediate"] == [
        "alias_of_intermediate_save_as_output",
        "alias_of_intermediate",
    ]
    assert metadata_of(described["intermediate"])["num_intermediate_bases"] == 1

    mutated, kept = metadata_of(described["mutation"])["input_info"]
    assert mutated["mutates_data"]
    assert mutated["mutation_type"] in ("MUTATED_IN_GRAPH", "MUTATED_OUT_GRAPH")
    assert not kept["mutates_data"]
    assert kept["mutation_type"] == "NOT_MUTATED"

    subclass = metadata_of(described["subclass"])["subclass_inp_meta"][0]
    assert subclass["original_subclass_type"].endswith(".TwoTensor")
    assert subclass["attrs"]["a"]["kind"] == subclass["attrs"]["b"]["kind"] == "plain"

    training = described["training"]
    assert training["runtime"]["backward"]["backward_state_indices"] == []
    assert training["times_ns"][1] > 0
    assert "backward" not in described["views"]["runtime"]
    assert described["dynamic"]["guards"]
    assert described["dynamic"]["variant"]
    assert metadata_of(described["dynamic"])["output_info"][0]["dynamic_dims"] == [0]
    assert any(name.startswith("kernel/") for name in described["kernel"]["names"])
    assert described["kernel"]["made_by"]["compiler"]
    assert "compiler" not in described["training"]["made_by"]
