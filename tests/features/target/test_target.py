"""``s3cache warm --target``: the description of a GPU, and what other machines refuse.

``infra/gpu/standin.sh`` runs jobs with it, on a CUDA build of torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from s3cache.cli import main
from s3cache.errors import ConfigError
from s3cache.features.target.description import stand_in
from tests.features.target import targets
from tests.support.gpu import standin
from tests.support.machines import ROOT, remote_url
from tests.support.marks import slow

needs_standin = pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)
DEVICE: dict[str, Any] = json.loads(Path(ROOT, "infra/gpu/h100.json").read_text())["device"]


@slow
@needs_standin
def test_a_description_has_what_keys_depend_on_and_a_refusal_names_differences(
    tmp_path: Path,
) -> None:
    job = "tests.features.target.targets:description"
    found = standin.machine(tmp_path).run(job).result
    described, h100 = found["described"], standin.GPUS["H100"]
    assert described["device"]["name"] == h100.name
    assert described["device"]["multi_processor_count"] == h100.multi_processor_count
    assert described["device"]["total_memory"] == h100.total_memory
    assert {"driver", "clock_rate", "max_num_regs", "count"} <= set(described["device"])
    assert not {"uuid", "pci_bus_id"} & set(described["device"])
    assert {"machine.accelerator", "system_info", "torch.build", "python.abi"} <= set(
        described["key"]
    )
    assert not {"machine.isa", "torch.cpu_capability"} & set(described["key"])
    for what, (part, name, value) in targets.CHANGES.items():
        here = described[part][name]
        assert f"{what} is {value} there and {here} here" in found["refusals"][what]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("sm_90", None, "is an architecture; keys also depend on the GPU's name"),
        ("gpu.json", None, "cannot be read (No such file or directory)"),
        ("gpu.json", "sm_90", "describes no GPU"),
        ("gpu.json", '{"s3cache target": 99}', "was written by another s3cache (99)"),
    ],
)
def test_an_invalid_description_is_a_one_line_error_that_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, cause: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(ConfigError) as raised, stand_in(name):
        pass
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"target {name}: {cause}")
    assert "s3cache target > gpu.json" in line


@needs_standin
def test_a_job_does_not_run_on_a_build_of_torch_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("S3CACHE_URL", remote_url(tmp_path))
    described = {"s3cache target": 1, "versions": {"torch": "9"}, "device": {}, "key": {}}
    Path("gpu.json").write_text(json.dumps(described))
    assert main(["warm", "--target", "gpu.json", "--", "touch", "ran"]) == 2
    said = capsys.readouterr().err
    assert "built without CUDA; no machine with a GPU looks up its keys" in said
    assert not Path("ran").exists()


@slow
@needs_standin
def test_the_library_matches_the_file_and_graphs_that_launched_are_not_saved(
    tmp_path: Path,
) -> None:
    machine = standin.machine(tmp_path, S3CACHE_URL=remote_url(tmp_path))
    found = machine.run("tests.features.target.targets:preload", DEVICE).result
    assert found["name"] == DEVICE["name"]
    assert found["driver"] == DEVICE["driver"]
    assert found["processors"] == DEVICE["multi_processor_count"]
    assert found["shared"] == DEVICE["shared_memory_per_block_optin"]
    assert found["capability"] == [DEVICE["major"], DEVICE["minor"]]
    assert found["count"] == DEVICE["count"]
    assert found["launches"] == [0, 0, 1]
    assert found["launching"] == {"inference": [0, {"target": 1}], "training": [0, {"target": 2}]}
    assert found["not launching"] == {"inference": [1, {}], "training": [2, {}]}
    assert found["another torch"] == {"inference": [0, {}], "training": [0, {}]}
