"""Each lookup is recorded, with its outcome, the components of its key, and the user's line."""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import s3cache
from s3cache import frame
from s3cache.artifact import Artifact
from s3cache.frame import Frame, decode
from s3cache.records import read_run, run_names
from s3cache.torch_api import installed_release, internals
from tests.hooks.jobs import traced
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@pytest.mark.needs("recall")
@slow
def test_each_frame_is_recorded_if_recall_is_on(site: Site) -> None:
    """The record has its function and line; the summary has its outcome."""
    for name, expected in (("one", "traced"), ("two", "recalled")):
        machine = site.machine(name, S3CACHE_RECALL="on")
        found = machine.run("test_records:frames", site.url)
        line = Path(__file__).read_text(encoding="utf-8").splitlines()[found["line"] - 1]
        assert line.endswith("# the frame")
        assert found["frames"] == [
            [expected, f"double {__file__}:{found['line']}"],
            ["refused: backend", f"other {__file__}:{found['line'] + 4}"],
        ]
        assert (
            "; {} recalled, {} traced, 1 refused (1 backend); ".format(
                *(("0 frames", 1) if expected == "traced" else ("1 frame", 0))
            )
            in found["words"]
        )


def frames(url: str) -> dict[str, Any]:
    @torch.compile  # the frame
    def double(x: torch.Tensor) -> torch.Tensor:
        return x @ x + x

    @torch.compile(backend="eager")
    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    with s3cache.enabled(url) as cache:
        double(torch.ones(4, 4))
        other(torch.ones(4))
        words = cache.stats().in_words()
        local = cache.settings.local_dir
    (name,) = run_names(local)
    ended = [[e.ended, e.name] for e in read_run(local, name).events if e.event == "recall"]
    wrapper: Any = double
    line = wrapper.__wrapped__.__code__.co_firstlineno
    return {"frames": ended, "words": words, "line": line}


@slow
def test_each_lookup_is_recorded(site: Site) -> None:
    machine = site.machine("one")
    found = machine.run("test_records:lookups", site.url)
    wholes = {
        name: [each for each in found[name] if each["kind"] == "aot"]
        for name in ("miss", "hit", "bypass", "later", "memory", "off")
    }
    outcomes = {name: [(r["outcome"], r["reason"]) for r in each] for name, each in wholes.items()}
    assert outcomes == {
        "miss": [("miss", "absent")],
        "hit": [("hit", "local")],
        "bypass": [("bypass", "function")],
        "later": [("hit", "local"), ("miss", "absent")],
        "memory": [("hit", "remote")],
        "off": [],
    }
    log = found["stderr"].splitlines()
    key = wholes["miss"][0]["key"]
    assert log.count(f"s3cache.lookups: miss {key} (absent)") == 1
    assert sum(line.startswith(f"s3cache.saves: saved {key} (") for line in log) == 1
    assert sum(line.startswith(f"s3cache.lookups: hit {key} (") for line in log) == 4
    ours = [line for line in log if line.startswith("s3cache")]
    ours = [re.sub(r"`s3cache explain`|\(s3cache explain [\w-]+\)", "", line) for line in ours]
    assert len(ours) > 10
    assert [line for line in ours if line.count("s3cache") != 1] == []
    (missed,), (hit,), (bypassed,) = wholes["miss"], wholes["hit"], wholes["bypass"]
    assert missed["key"] == hit["key"]
    assert missed["components"]["torch.version"][1][:2] == "2."
    assert hit["saved_s"] > 0
    if installed_release() >= (2, 12):  # earlier releases write no code of a graph for its key
        assert "sin()" in missed["parts"]["gm"]["code"]
    assert "shape=torch.Size([4])" in missed["parts"]["example_inputs"]["0"]
    assert Artifact.parts_of(entry_of(site.remote, missed["key"])) == missed["parts"]
    graphs = [each for each in found["miss"] if each["kind"] == "fx"]
    assert [(each["outcome"], each["of_whole"]) for each in graphs] == [("miss", True)]

    source = __file__
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    for each in (missed, hit, bypassed):
        file, line, function = each["where"]
        assert (file, function) == (source, "lookups")
        assert lines[line - 1].endswith("# called here")
    (reason,) = bypassed["reasons"]
    number = next(index for index, line in enumerate(lines, 1) if line.endswith("# the line"))
    assert reason["line"] == f"{source}:{number}: return mine(y) + 2  # the line"

    # A run for each cache that keeps records on a disk, the latest first.
    root = str(machine.root / "local")
    runs = [read_run(root, name) for name in run_names(root)]
    kept = [[record.as_dict() for record in run.records] for run in runs]
    expected = [found[name] for name in ("bypass", "hit", "later", "miss")]
    assert sorted(map(json.dumps, kept)) == sorted(map(json.dumps, expected))


def entry_of(remote: Path, key: str) -> Frame:
    (path,) = remote.rglob(f"{key}.0")
    return decode(path.read_bytes())


@slow
def test_a_graph_that_no_process_would_read_is_a_bypass_and_not_saved(site: Site) -> None:
    """Otherwise, each process would set the entry aside, compile, and save it again."""
    unreadable = site.machine("one").run("test_records:unreadable", site.url)
    assert unreadable["aot"]["entry"] == 1
    assert unreadable["fx"] == {"entry": 2}
    assert (unreadable["saved"], unreadable["saved_fx"]) == (0, 0)
    assert site.entries(halves=True) == []


# -- the job


def mine(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def unknown(x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    return mine(y) + 2  # the line


def lookups(url: str) -> dict[str, list[dict[str, Any]]]:
    """Return the records of lookups under each group of settings, each in its own cache."""
    torch.compiler.allow_in_graph(mine)
    logger = logging.getLogger("s3cache")
    logger.setLevel(logging.DEBUG)
    handler = logging.StreamHandler()  # to stderr
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    found: dict[str, list[dict[str, Any]]] = {}
    settings: dict[str, dict[str, Any]] = {
        "miss": {},
        "hit": {},
        "bypass": {},
        "later": {},
        "memory": {"local": False},
        "off": {"record": False},
    }
    for name, given in settings.items():
        torch._dynamo.reset()
        with s3cache.enabled(url, **given) as cache:
            called = torch.compile(unknown if name == "bypass" else function)
            called(torch.ones(4))  # called here
            if name == "later":  # after a hit, a graph that was never saved
                torch.compile(torch.sin, dynamic=False)(torch.ones(5))
            cache.flush(60)
        run = cache.engine.recorded()
        found[name] = [record.as_dict() for record in run.records]
    return found


class Restoring:
    """An object that runs code of the program while it is unpickled."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("an entry is read without it")


def unreadable(url: str) -> dict[str, Any]:
    """Compile graphs with an object that no process would read; return the bypasses by level."""

    def holding(hook: Any, at: int) -> None:
        owner, name = hook.owner()
        original = getattr(owner, name)

        @functools.wraps(original)
        def with_unreadable_note(*args: Any, **kwargs: Any) -> Any:
            vars(args[at])["note"] = note = Restoring()
            vars(note)["x"] = 1
            return original(*args, **kwargs)

        setattr(owner, name, staticmethod(with_unreadable_note))

    holding(internals.pickle_entry, 0)
    holding(internals.fx_save, 1)
    torch.compiler.allow_in_graph(mine)
    with s3cache.enabled(url) as cache:
        torch.compile(function)(torch.ones(4))
        torch.compile(unknown)(torch.ones(4))  # its key is at the second level alone
        cache.flush(60)
        stats = cache.stats()
    return {
        "aot": dict(stats.bypass_reasons),
        "fx": dict(stats.fx.bypass_reasons),
        "saved": stats.saved,
        "saved_fx": stats.fx.saved,
    }


# -- torch's trace, its profiler and tlparse show events of s3cache among torch's own


def profiled(url: str) -> dict[str, Any]:
    """Call a function under the profiler, and then run a forward without a backward.

    Return the names of the events of s3cache that the profiler saw.
    """
    with s3cache.enabled(url) as cache:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.compile(lambda x: x.sin() @ x)(torch.ones(4, 4))
        torch.compile(lambda x: x.cos() @ x)(torch.ones(4, 4, requires_grad=True))
        cache.flush(60)
    names = {event.name for event in profiler.events()}
    return {"profiled": sorted(names & {"s3cache.lookup", "s3cache.save"})}


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
        ran = machine.run("test_records:profiled", site.url)
        is_miss = outcome == "miss"
        assert ran["profiled"] == ["s3cache.lookup"] + ["s3cache.save"] * is_miss
        logged = {"miss": " (absent)", "hit": " (remote), "}[outcome]
        assert re.search(rf"\] {outcome} \w+{re.escape(logged)}", ran["stderr"])  # TORCH_LOGS
        lines = traced(folder)
        artifacts = {line["artifact"]["name"]: line for line in lines if "artifact" in line}
        about = json.loads(artifacts[f"aotautograd_cache_{outcome}"]["payload"])
        assert is_miss or (about["key"][0] == "a" and about["time_saved_ms"] > 0)
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
