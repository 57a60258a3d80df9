"""Each lookup is recorded: what became of it, what its key is made of, and the user's line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.artifact import Artifact
from s3cache.frame import Frame, decode
from s3cache.records import read_run, run_names
from s3cache.torch_api import installed_release
from tests.support.marks import slow

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@slow
def test_each_lookup_is_recorded(site: Site) -> None:
    machine = site.machine("one")
    found = machine.run("records:lookups", site.url)
    wholes = {
        name: [each for each in found[name] if each["level"] == "aot"]
        for name in ("miss", "hit", "bypass", "later", "memory", "off")
    }
    said = {name: [(r["outcome"], r["reason"]) for r in each] for name, each in wholes.items()}
    assert said == {
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
    assert sum("s3cache explain" in line and "read on" not in line for line in log) == 1
    ours = [line.replace("`s3cache explain`", "") for line in log if line.startswith("s3cache")]
    assert len(ours) > 10
    assert [line for line in ours if line.count("s3cache") != 1] == []
    (missed,), (hit,), (bypassed,) = wholes["miss"], wholes["hit"], wholes["bypass"]
    assert missed["key"] == hit["key"]
    assert missed["components"]["torch.version"][1][:2] == "2."
    assert hit["saved_s"] > 0
    if installed_release() >= (2, 12):  # earlier ones write no code of a graph for its key
        assert "sin()" in missed["parts"]["gm"]["code"]
    assert "shape=torch.Size([4])" in missed["parts"]["example_inputs"]["0"]
    assert Artifact.parts_of(entry_of(site.remote, missed["key"])) == missed["parts"]
    graphs = [each for each in found["miss"] if each["level"] == "fx"]
    assert [(each["outcome"], each["of_whole"]) for each in graphs] == [("miss", True)]

    source = str(Path(__file__).with_name("records.py"))
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
    assert sorted(map(str, kept)) == sorted(str(_in_tuples(each)) for each in expected)


def entry_of(remote: Path, key: str) -> Frame:
    (path,) = remote.rglob(f"{key}.0")
    return decode(path.read_bytes())


def _in_tuples(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """As records are before JSON has made lists of tuples."""
    from s3cache.records import Record

    return [Record.from_dict(each).as_dict() for each in records]


@slow
def test_what_no_entry_can_hold_is_recorded_and_not_saved(site: Site) -> None:
    """Under the key that missed, so that ``s3cache check`` and ``explain`` can say it.

    What no process would read would be set aside by each, compiled, and saved again.
    """
    found = site.machine("one").run("records:unshared", site.url)
    missed, refused = found["refused"]
    assert (missed["outcome"], missed["reason"]) == ("miss", "absent")
    assert (refused["outcome"], refused["reason"]) == ("bypass", "entry")
    assert refused["key"] == missed["key"]
    assert "cannot be pickled" in refused["reasons"][0]["message"]
    unreadable = found["unreadable"]
    assert unreadable["aot"]["entry"] == 1
    assert unreadable["fx"] == {"entry": 2}
    assert (unreadable["saved"], unreadable["saved_fx"]) == (0, 0)
    assert list(site.remote.rglob("*.0")) == []
