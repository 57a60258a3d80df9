"""What a process leaves for Prometheus when it ends."""

from __future__ import annotations

import os
import stat
import textwrap
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ConfigError
from s3cache.metrics import write_textfile
from tests.metrics.counts import read
from tests.support.sites import Site

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(900)

# Enabled, and a lookup and a save without a compile.
_PROGRAM = textwrap.dedent(
    """
    import s3cache
    from tests.support.caching import entry

    cache = s3cache.enable()
    cache.lookup("key-1")
    cache.save("key-1", entry("key-1"))
    """
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_process_leaves_its_counts_when_it_ends(site: Site, tmp_path: Path) -> None:
    """The uploads of the exit are among them."""
    place = tmp_path / "collected"
    place.mkdir()
    machine = site.machine(
        "one", S3CACHE_URL=site.url, S3CACHE_METRICS_FILE=f"{place}/job-{{rank}}.prom"
    )
    for rank in ("0", "3"):
        done = machine.start("-c", _PROGRAM, RANK=rank)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
    assert {each.name for each in place.iterdir()} == {"job-0.prom", "job-3.prom"}
    there = read((place / "job-0.prom").read_text())
    assert there["s3cache_misses_total", (("level", "aot"), ("reason", "absent"))] == 1
    assert there["s3cache_saved_total", (("level", "aot"),)] == 1
    assert there["s3cache_uploads_total", ()] >= 1
    again = read((place / "job-3.prom").read_text())
    assert again["s3cache_hits_total", (("level", "aot"), ("tier", "local"))] == 1


@pytest.mark.parametrize("without", ["the directory", "the client"])
def test_what_keeps_it_from_that_is_one_warning(site: Site, tmp_path: Path, without: str) -> None:
    place = tmp_path / "collected" / "job.prom"
    hidden = 'import sys; sys.modules["prometheus_client"] = None\n'
    if without == "the client":
        place.parent.mkdir()
    machine = site.machine("one", S3CACHE_URL=site.url, S3CACHE_METRICS_FILE=str(place))
    done = machine.start("-c", (hidden if without == "the client" else "") + _PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no metrics are left in") == len(done.stderr.splitlines()) == 1
    assert ("pip install prometheus-client" in done.stderr) == (without == "the client")


def test_what_is_no_regular_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """``/dev/null`` of a machine, where the program is root's."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no regular file"):
        write_textfile(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
