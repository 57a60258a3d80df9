"""What s3cache does is among torch's own events, in its trace, its profiler and tlparse."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.records import read_run, run_names
from tests.support.density import dense
from tests.support.waiting import LONG_S

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
    machine = site.machine(outcome, TORCH_TRACE=str(folder), TORCH_LOGS="+s3cache")
    return folder, machine.run("tracing:compiled", site.url, outcome == "miss")


@dense
def test_a_miss_and_a_hit_are_in_torchs_trace_profile_and_log(site: Site, tmp_path: Path) -> None:
    """torch's own words for a hit of its cache are there too."""
    recorded = {}
    for outcome, reason in (("miss", "absent"), ("hit", "remote")):
        folder, told = run_traced(site, tmp_path, outcome)
        expected = ["s3cache.lookup"] + ["s3cache.save"] * (outcome == "miss")
        assert told["profiled"] == expected
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


TLPARSE = shutil.which("tlparse", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


@dense
@pytest.mark.skipif(TLPARSE is None, reason="there is no tlparse for this platform")
def test_tlparse_shows_a_hit(site: Site, tmp_path: Path) -> None:
    for outcome, transfer in (("miss", "s3cache.upload"), ("hit", "s3cache.download")):
        folder, _ = run_traced(site, tmp_path, outcome)
        (log,) = folder.glob("*.log")
        page = tmp_path / f"{outcome}-page"
        done = subprocess.run(
            [str(TLPARSE), str(log), "-o", str(page), "--no-browser"],
            capture_output=True,
            text=True,
            timeout=LONG_S,
        )
        assert done.returncode == 0, done.stderr
        index = (page / "index.html").read_text(encoding="utf-8")
        assert f"aotautograd_cache_{outcome}" in index
        events = (page / "chromium_events.json").read_text(encoding="utf-8")
        assert {"s3cache.lookup", transfer, "s3cache transfers"} <= {
            *re.findall(r'"(s3c[^"]+)"', events)
        }
