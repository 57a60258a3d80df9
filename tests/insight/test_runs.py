"""Which runs are those of a program that somebody names."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from s3cache import explain
from s3cache.errors import ConfigError
from s3cache.insight import meaning
from s3cache.records import run_names

if TYPE_CHECKING:
    from pathlib import Path

RECORDS = """
import os, sys
from s3cache.records import Record, Recorder
recorder = Recorder(os.environ["S3CACHE_LOCAL_DIR"])
os.chdir("/")  # wherever it has gone since
recorder.add(Record("aot", "miss", key="k" + sys.argv[1], reason="absent", time=1.0))
recorder.close(60)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs that record one lookup each, with their argument in its key."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir(mode=0o700)
    for name in ("train.py", "other/train.py", "package/job.py", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(RECORDS)
    return tmp_path


def run(home: Path, *program: str) -> None:
    # Names of runs have seconds alone, and the latest comes first: give each one a second.
    before = len(run_names(str(home / "local")))
    subprocess.run([sys.executable, *program], cwd=home, check=True)
    names = run_names(str(home / "local"))
    assert len(names) == before + 1
    new = max(names, key=lambda name: (home / "local/records" / f"{name}.jsonl").stat().st_ctime_ns)
    file = home / "local/records" / f"{new}.jsonl"
    file.rename(file.with_name(f"2026010{before + 1}-{file.name}"))


def keys(**asked: str) -> list[str]:
    return [each.record.key for each in explain(**asked).explanations]  # type: ignore[arg-type]


def test_the_last_run_of_a_script_or_module_is_explained(home: Path) -> None:
    """However it was called, and wherever the program itself went."""
    run(home, "train.py", "1")
    run(home, str(home / "train.py"), "2")
    run(home, "other/train.py", "3")
    run(home, "-m", "package.job", "4")
    run(home, "-m", "package", "5")
    run(home, "package", "6")
    (home / "link.py").symlink_to("train.py")
    for name in ("train.py", "./train.py", "other/../train.py", str(home / "train.py"), "link.py"):
        assert keys(script=name) == ["k2"], name
    assert keys(script="other/train.py") == ["k3"]
    assert keys(module="package.job") == keys(script="package/job.py") == ["k4"]
    assert keys(module="package") == ["k5"]
    assert keys(script="package") == keys() == ["k6"]
    with pytest.raises(ConfigError, match="said twice"):
        explain(key="k1", script="train.py")


def test_in_another_directory_the_end_of_the_path_is_enough(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(home, "train.py", "1")
    run(home, "package/job.py", "2")
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert keys(script="train.py") == ["k1"]
    assert keys(script="package/job.py") == ["k2"]
    run(home, "other/train.py", "3")
    several = f"is the end of several: {home}/other/train.py, {home}/train.py"
    with pytest.raises(ConfigError, match=several):
        explain(script="train.py")
    with pytest.raises(ConfigError):  # it is no end of a name
        explain(script="rain.py")


def test_an_existing_script_is_not_another_of_its_name(home: Path) -> None:
    with pytest.raises(ConfigError, match="only of nothing"):
        explain(script="train.py")
    run(home, "other/train.py", "1")
    with pytest.raises(ConfigError, match=f"only of {home}/other/train.py;") as caught:
        explain(script="train.py")
    assert "s3cache run train.py" in str(caught.value)
    assert "s3cache check train.py" in str(caught.value)
    with pytest.raises(ConfigError, match="s3cache run -m none"):
        explain(module="none")


def test_a_word_is_a_key_before_a_script(home: Path) -> None:
    run(home, "train.py", "1")
    assert meaning("nonsense") == {}
    for name in ("k1", "nonsense"):
        (home / name).write_text("")
    assert meaning("k1") == {"key": "k1"}
    for name in ("./k1", "train.py", "absent.py", "nonsense"):
        assert meaning(name) == {"script": name}
