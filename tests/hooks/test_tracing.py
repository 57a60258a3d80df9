"""torch's trace, its profiler and tlparse show events of s3cache among torch's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from s3cache import frame
from s3cache.torch_api import internals
from tests.hooks.tracing import traced
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def ended(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return torch's and our own events, as torch records them when they end."""
    payloads = [json.loads(line["payload"]) for line in lines if "chromium_event" in line]
    return [each for each in payloads if each["tid"] == 0 and each["ph"] == "E"]


def summaries(events: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the name, level and outcome of our events, in their order."""
    ours = [each for each in events if each["name"].startswith("s3cache.")]
    return [
        (each["name"], each["args"]["level"], each["args"].get("outcome", "saved")) for each in ours
    ]


def test_an_event_is_shown_if_a_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event inside another one with the same name is not; torch would end the wrong one."""
    monkeypatch.setattr(internals.trace_log.get(), "handlers", [])  # neither trace nor pytest's
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        with internals.trace_event("s3cache.lookup", "aot") as about:
            about["key"] = "a1"
            with internals.trace_event("s3cache.lookup", "fx"):
                pass
        with internals.trace_event("s3cache.save", "aot"):
            pass
    with internals.trace_event("s3cache.lookup", "aot") as about:
        pass
    # Without the data that torch adds to each event.
    names = [event.name for event in profiled.events() if "_data" not in event.name]
    assert names == ["s3cache.lookup", "s3cache.save"]
    assert about == {"level": "aot"}  # torch did not end the event, so it added nothing


@slow
def test_a_miss_and_a_hit_are_in_torchs_trace_profile_and_log(site: Site, tmp_path: Path) -> None:
    """At both levels, within torch's own events. torch logs the components of a key."""
    logs = "+s3cache,+torch._functorch._aot_autograd.autograd_cache"
    for outcome, reason in (("miss", "absent"), ("hit", "remote")):
        folder = tmp_path / outcome
        machine = site.machine(outcome, TORCH_TRACE=str(folder), TORCH_LOGS=logs)
        ran = machine.run("tracing:compiled", site.url)
        is_miss = outcome == "miss"
        assert ran["profiled"] == ["s3cache.lookup"] + ["s3cache.save"] * is_miss
        logged = {"miss": " (absent)", "hit": " (remote), "}[outcome]
        assert re.search(rf"\] {outcome} \w+{re.escape(logged)}", ran["stderr"])  # TORCH_LOGS
        lines = traced(folder)
        artifacts = [line["artifact"]["name"] for line in lines if "artifact" in line]
        assert f"aotautograd_cache_{outcome}" in artifacts
        events = ended(lines)
        whole = [("s3cache.lookup", "aot", outcome)]
        if is_miss:  # the FX graph is looked up and saved before the whole graph
            whole += [("s3cache.lookup", "fx", "miss")]
            whole += [("s3cache.save", "fx", "saved"), ("s3cache.save", "aot", "saved")]
        half = [("s3cache.lookup", "aot", "miss"), ("s3cache.lookup", "fx", outcome)]
        half += [("s3cache.save", "fx", "saved")] * is_miss
        assert summaries(events) == whole + half
        payloads = [json.loads(line["payload"]) for line in lines if "chromium_event" in line]
        ours = [each for each in payloads if each["tid"] == 0 and "s3cache." in each["name"]]
        about = ours[1]["args"]
        assert (about["outcome"], about["reason"]) == (outcome, reason)
        assert about["key"].startswith("a")
        compiles = [each for each in events if each["name"] == "backend_compile"]
        assert all(each["args"]["remote_cache_enabled"] for each in compiles)
        # They lie between torch's own events of the compile, on the same clock.
        others = [each["ts"] for each in payloads if each["tid"] == 0 and each not in ours]
        assert min(others) <= ours[0]["ts"] <= ours[1]["ts"] <= max(others)
        if is_miss:
            headers = [frame.decode(path.read_bytes()).header for path in site.entries()]
            (entry,) = (header for header in headers if header.kind == "aot")
            assert f"Autograd graph cache hash details for key {entry.key}" in ran["stderr"]
            assert len(entry.meta["components"]) > 9
            for name, (digest, _) in entry.meta["components"].items():
                assert f"[{digest}] {name}: " in ran["stderr"]
