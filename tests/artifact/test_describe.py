"""An entry says what it is and does, to a reader that has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machines import ROOT, Machine

if TYPE_CHECKING:
    from pathlib import Path

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
with open(sys.argv[1], "rb") as file:
    entry = frame.decode(file.read())
header = entry.header
found = {"kind": header.kind, "names": entry.names, "variant": header.variant,
         **header.meta, "runtime": to_plain(description(header))}
print(json.dumps(found, default=repr))
"""


@pytest.fixture
def described(tmp_path: Path) -> dict[str, Any]:
    """Return what the header of an entry says, read without torch."""
    machine = Machine(tmp_path / "writer", TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
    url = f"file://{tmp_path / 'remote'}?create=1"
    path = machine.run("tests.artifact.compiled:entry", url).result
    command = [sys.executable, "-c", _READER, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_entry_can_be_read_without_torch(described: dict[str, Any]) -> None:
    """Kinds of outputs, mutations, guards, times, and what the key is made of.

    ``tests/kinds`` compares the description of every kind of graph with torch's own object.
    """
    assert described["kind"] == "aot"
    assert all(time > 0 for time in described["times_ns"])
    assert described["components"]["torch.version"][1].startswith("2.")
    assert all(len(digest) == 32 for digest, _ in described["components"].values())
    made_by = described["made_by"]
    assert made_by["torch"] == described["components"]["torch.version"][1]
    assert made_by["platform"]
    assert made_by["device"] == "cpu"
    assert "/" not in made_by["compiler"]
    assert described["guards"]
    assert described["variant"]
    assert any(name.startswith("kernel/") for name in described["names"])

    runtime = described["runtime"]
    metadata = runtime["runtime_metadata"]
    product, view = metadata["output_info"]
    assert product["output_type"] == "non_alias"
    assert product["dynamic_dims"] == [0]
    assert view["output_type"] == "alias_of_input"
    mutations = [info["mutation_type"] for info in metadata["input_info"]]
    assert metadata["input_info"][view["base_idx"]]["mutation_type"] == "NOT_MUTATED"
    (mutated,) = [info for info in metadata["input_info"] if info["mutates_data"]]
    assert mutated["mutation_type"] in ("MUTATED_IN_GRAPH", "MUTATED_OUT_GRAPH")
    assert mutations.count("NOT_MUTATED") == len(mutations) - 1
    assert runtime["backward"]["backward_state_indices"] == []
