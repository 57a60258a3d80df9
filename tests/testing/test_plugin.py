"""pytest finds the plugin, a moto server lives as long as its tests, and starts can be checked."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from s3cache.errors import ConfigError
from s3cache.stats import CacheStats, Counters, LevelStats, Reason
from s3cache.testing import Machine, MotoBucket, MotoServer, Outcome, assert_warm_start
from tests.support import machines
from tests.support.marks import slow
from tests.support.scripts import python
from tests.testing import jobs

HEAVY = ("torch", "numpy", "boto3", "botocore", "aioboto3", "moto", "flask", "hypothesis", "http")


def test_a_run_without_our_fixtures_imports_no_heavy_packages(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs(request):\n"
        "    assert request.config.pluginmanager.has_plugin('s3cache')\n"
        "    print(*sys.modules, sep='\\n')\n"
    )
    plugins = {each.name for each in entry_points(group="pytest11")} - {"s3cache"}
    others = [f"-pno:{name}" for name in sorted(plugins)]
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rP", *others, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = set(done.stdout.split())
    assert "s3cache.testing.plugin" in loaded
    assert loaded.isdisjoint(HEAVY)
    ours = {"s3cache", "s3cache.util", "s3cache.testing", "s3cache.testing.plugin"}
    assert {name for name in loaded if name.startswith("s3cache")} == ours


def test_a_program_needs_its_environment_only_and_the_bucket_is_empty(
    s3cache_moto: MotoBucket, s3cache_moto_server: MotoServer, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "machine", **s3cache_moto.environment)
    assert machine.call(jobs.use_the_bucket).result == "[] ['key']"
    assert s3cache_moto.secret_key not in s3cache_moto.url + repr(s3cache_moto)
    assert s3cache_moto_server.make_bucket().url != s3cache_moto.url


@slow
def test_the_server_ends_with_the_process_that_started_it() -> None:
    """It ends even if that process is killed and does not close it."""
    code = (
        "import os, psutil\n"
        "from s3cache.testing import MotoServer\n"
        "server = MotoServer()\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = python("-c", code)
    assert done.returncode == -9, done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(30)


def test_a_missing_flask_raises_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(
        ConfigError, match=r"flask is not installed; run: pip install .*\[testing\]"
    ):
        MotoServer()


HIT = replace(
    Counters().read(CacheStats, local=None, pending=0, breaker="none", remote={}, fx=LevelStats()),
    hits={"remote": 1},
)
WARM = Outcome("job", 0, "loss 1\n", "", recorded=HIT)


@slow
@pytest.mark.timeout(900)
def test_a_well_cached_job_passes_and_the_one_that_compiled_does_not(tmp_path: Path) -> None:
    """The job has a smaller last batch, a forward without a backward, and compiled autograd."""
    url = f"file://{tmp_path / 'remote'}?create=1"

    def run(server: int, job: str = "train") -> Outcome:
        machine = machines.Machine(tmp_path / f"{server}-{job}")
        return machine.run(f"tests.testing.jobs:{job}", url, server=server)

    first, second = run(0), run(1)
    assert second.stats.misses  # misses alone are no reason to fail
    assert_warm_start(first, second)
    with pytest.raises(AssertionError, match=r"compiled on the second machine: .* missed"):
        assert_warm_start(second, first)

    off = run(2, "train_without_caches")
    with pytest.raises(AssertionError, match=r"with torch's caches off \(fx-graph-cache-off\)"):
        assert_warm_start(first, off)
    none = run(2, "train_none")
    with pytest.raises(AssertionError, match="hit nothing"):
        assert_warm_start(first, none)


def test_a_bypass_counts_only_if_no_level_has_the_graph() -> None:
    known = replace(
        HIT, bypassed=1, bypass_reasons={"function": 1}, fx=LevelStats(hits={"remote": 2})
    )
    assert_warm_start(WARM, replace(WARM, recorded=known))
    unknown = replace(known, fx=LevelStats(bypassed=1, bypass_reasons={"custom-operator": 1}))
    with pytest.raises(AssertionError, match=r"1 FX graph cannot be cached \(custom-operator\)"):
        assert_warm_start(WARM, replace(WARM, recorded=unknown))


def test_the_error_names_pending_uploads_of_the_first_machine() -> None:
    missed = replace(HIT, fx=LevelStats(misses={Reason.ABSENT: 2}))
    slow = replace(WARM, recorded=replace(HIT, pending=3))
    with pytest.raises(AssertionError, match=r"2 FX graphs missed[^$]*3 still to upload"):
        assert_warm_start(slow, replace(WARM, recorded=missed))


def test_outputs_or_selected_parts_of_them_must_be_equal() -> None:
    other = replace(WARM, stdout="loss 2\n")
    with pytest.raises(AssertionError, match=r"-loss 1\n\+loss 2"):
        assert_warm_start(WARM, other)
    assert_warm_start(WARM, other, same=lambda outcome: outcome.stdout.split()[0])
    with pytest.raises(AssertionError, match="something else"):
        assert_warm_start(replace(WARM, result=[1.0]), replace(WARM, result=[1.5]))
