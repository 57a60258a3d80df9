"""What s3cache does is among torch's own events, in its trace, its profiler and tlparse."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from s3cache import frame
from s3cache.records import read_run, run_names
from tests.support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def traced(folder: Path) -> list[dict[str, Any]]:
    """The structured trace that torch has written: each line's head, and its payload."""
    (file,) = folder.glob("*.log")
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            found[-1]["payload"] = found[-1].get("payload", "") + line[1:]
        elif (start := line.find("] {")) >= 0:
            found.append(json.loads(line[start + 2 :]))
    return found


def run_traced(site: Site, tmp_path: Path, outcome: str) -> tuple[Path, dict[str, Any]]:
    """The folder that torch has traced to, and what the job has said."""
    folder = tmp_path / outcome
    logs = "+s3cache,+torch._functorch._aot_autograd.autograd_cache"
    machine = site.machine(outcome, TORCH_TRACE=str(folder), TORCH_LOGS=logs)
    return folder, machine.run("tracing:compiled", site.url, outcome == "miss")


def ended(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What torch says of its events, and of ours, as each ends."""
    payloads = [json.loads(line["payload"]) for line in lines if "chromium_event" in line]
    return [each for each in payloads if each["tid"] == 0 and each["ph"] == "E"]


def told_of(events: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Name, level and outcome of our events, in their order."""
    ours = [each for each in events if each["name"].startswith("s3cache.")]
    return [
        (each["name"], each["args"]["level"], each["args"].get("outcome", "saved")) for each in ours
    ]


@slow
def test_a_miss_and_a_hit_are_in_torchs_trace_profile_and_log(site: Site, tmp_path: Path) -> None:
    """torch's own words for a hit of its cache are there too."""
    recorded = {}
    for outcome, reason in (("miss", "absent"), ("hit", "remote")):
        folder, told = run_traced(site, tmp_path, outcome)
        is_miss = outcome == "miss"
        assert told["profiled"] == ["s3cache.lookup"] + ["s3cache.save"] * is_miss
        expected = ["s3cache.lookup"]
        if is_miss:  # the FX graph is asked for, and saved, before the whole
            expected += ["s3cache.lookup", "s3cache.save", "s3cache.save"]
        logged = {"miss": " (absent)", "hit": " (remote), "}[outcome]
        assert re.search(rf"\] {outcome} \w+{re.escape(logged)}", told["stderr"])  # TORCH_LOGS
        lines = traced(folder)
        artifacts = [line["artifact"]["name"] for line in lines if "artifact" in line]
        assert f"aotautograd_cache_{outcome}" in artifacts
        payloads = [json.loads(line["payload"]) for line in lines if "chromium_event" in line]
        ours = [each for each in payloads if each["tid"] == 0 and "s3cache." in each["name"]]
        assert [each["name"] for each in ours] == [name for name in expected for _ in range(2)]
        assert [each["ph"] for each in ours] == ["B", "E"] * len(expected)
        about = ours[1]["args"]
        assert (about["outcome"], about["reason"]) == (outcome, reason)
        assert about["key"].startswith("a")
        assert [each["args"]["level"] for each in ours[1::2]] == ["aot", "fx", "fx", "aot"][
            : len(expected)
        ]
        (compile_,) = (each for each in ended(lines) if each["name"] == "backend_compile")
        assert compile_["args"]["remote_cache_enabled"] is True
        # It lies within what torch itself says of the compile, on the same clock.
        others = [each["ts"] for each in payloads if each["tid"] == 0 and each not in ours]
        assert min(others) <= ours[0]["ts"] <= ours[1]["ts"] <= max(others)
        transfers = {each["args"]["ended"]: each for each in payloads if each["ph"] == "X"}
        assert {each["args"]["key"] for each in transfers.values()} >= {about["key"]}
        if outcome == "miss":  # the upload is written at the exit, after all that torch says
            assert transfers["absent"]["name"] == "s3cache.download"
            assert transfers["done"]["name"] == "s3cache.upload"
            assert payloads[-1] == transfers["done"]
        else:
            assert transfers["done"]["name"] == "s3cache.download"
            end = transfers["done"]["ts"] + transfers["done"]["dur"]
            assert ours[0]["ts"] <= transfers["done"]["ts"] <= end <= ours[1]["ts"]
        root = str(site.machine(outcome).root / "local")
        (run,) = (read_run(root, each) for each in run_names(root))
        recorded[outcome] = {each.event: each for each in run.events if each.ended == "done"}
    assert set(recorded["miss"]) == {"compile", "save", "upload"}
    assert set(recorded["hit"]) == {"download"}
    assert recorded["hit"]["download"].size == recorded["miss"]["upload"].size
    assert recorded["miss"]["compile"].name == recorded["miss"]["save"].name == about["key"]
    assert recorded["miss"]["compile"].elapsed_s > 0


@slow
def test_the_second_level_is_in_torchs_trace(site: Site, tmp_path: Path) -> None:
    for outcome in ("miss", "hit"):
        folder = tmp_path / outcome
        site.machine(outcome, TORCH_TRACE=str(folder)).run("tracing:halved", site.url)
        events = ended(traced(folder))
        expected = [("s3cache.lookup", "aot", "miss"), ("s3cache.lookup", "fx", outcome)]
        saves = [("s3cache.save", "fx", "saved")] * (outcome == "miss")
        assert told_of(events) == expected + saves
        compiles = [each["args"] for each in events if each["name"] == "inductor_compile"]
        assert [each["remote_cache_enabled"] for each in compiles] == [True]


@slow
def test_what_torch_logs_of_a_key_are_its_components(site: Site, tmp_path: Path) -> None:
    """``TORCH_LOGS`` with torch's cache, at DEBUG."""
    _, told = run_traced(site, tmp_path, "miss")
    entry = next(
        header
        for path in site.entries()
        if (header := frame.decode(path.read_bytes()).header).kind == "aot"
    )
    assert f"Autograd graph cache hash details for key {entry.key}" in told["stderr"]
    components = entry.meta["components"]
    assert len(components) > 9
    for name, (digest, _) in components.items():
        assert f"[{digest}] {name}: " in told["stderr"]


@slow
def test_compiled_autograd_counts_and_traces_as_with_torch_alone(
    site: Site, tmp_path: Path
) -> None:
    """Of a backward under the stance ``force_eager``, which is captured, nothing is looked up."""
    found = {}
    for name, url in (("alone", ""), ("first", site.url), ("second", site.url)):
        folder = tmp_path / name
        told = site.machine(name, TORCH_TRACE=str(folder)).run("tracing:captured", url)
        artifacts = [line["artifact"]["name"] for line in traced(folder) if "artifact" in line]
        counts = told["compiled"][0], told["eager"][0]
        found[name] = counts, [each for each in artifacts if "compiled_autograd" in each]
        assert told["compiled"][1] == told["eager"][1] == bool(url)
    assert found["alone"][1]
    assert found["first"] == found["second"] == found["alone"]
