"""Many processes on a local tier that is full: what each of them saves stays, and is right.

How long that takes is not said here, but by benchmarks/storage.py: the limits on time are lifted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.cache import Cache, Hit
from s3cache.settings import Settings
from s3cache.tier import DiskTier
from tests.support.marks import nightly, slow
from tests.support.worker import entry, keys

if TYPE_CHECKING:
    from collections.abc import Mapping

REPOSITORY = Path(__file__).parents[2]
SIZE, SAVES = 2_000, 10
DEFAULT_FILES = Settings().local_max_files

# Each child is a process that trains: it saves, looks up what it and others have, and ends.
SCRIPT = """
    import json, os, random, sys
    from s3cache import Cache, Hit, Saved
    from s3cache.tier import _disk
    from s3cache.util.threads import DeadlineExecutor
    from tests.support.worker import entry, keys

    # A disk that takes seconds is done without. With so many on few cores any may: what is counted
    # here is not how long things take.
    DeadlineExecutor.limit_s = _disk.LOCK_TIMEOUT_S = 120.0

    options, children, saves, size = json.loads(sys.argv[1])

    def live(number):
        counts = {"not durable": 0, "wrong": 0, "missed": 0}
        cache = Cache.open(**options)
        mine = keys(number * saves, saves, "ours")
        for key in mine:
            saved = cache.save(key, entry(key, size))
            counts["not durable"] += not (isinstance(saved, Saved) and saved.durable)
        others = random.Random(number).sample(range(children * saves), saves)
        for key in [*mine, *(f"key-ours{other:04}" for other in others)]:
            found = cache.lookup(key)
            if isinstance(found, Hit):
                counts["wrong"] += bytes(found.entry.data) != entry(key, size)
            else:
                counts["missed"] += key in mine
        cache.close(60)
        return counts

    begin, go = os.pipe()
    running = []
    for number in range(children):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(go)
                os.read(begin, 1)  # all at once
                os.write(writer, json.dumps(live(number)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        running.append((child, reader))
    os.close(go)
    total = {"failed": 0}
    for child, reader in running:
        with open(reader) as said:
            counts = said.read()
        _, status = os.waitpid(child, 0)
        total["failed"] += status != 0
        for name, count in json.loads(counts or "{}").items():
            total[name] = total.get(name, 0) + count
    print(json.dumps(total))
    """


def fill(root: Path, files: int) -> None:
    """As many files as the tier may have, of another namespace."""
    tier = DiskTier(root, max_bytes=1 << 34, max_files=files, namespace="0" * 16)
    for number in range(files):
        tier.put(f"v1/{number % 4096:03x}/filler-{number}._", b"x")
    assert tier.usage().files == files
    tier.close()


def lived(options: Mapping[str, object], processes: int) -> dict[str, int]:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            textwrap.dedent(SCRIPT),
            json.dumps([options, processes, SAVES, SIZE]),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "s3cache: " not in done.stderr, done.stderr
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


@pytest.mark.timeout(550)
@pytest.mark.parametrize(
    ("processes", "files"),
    [
        pytest.param(8, 300, id="some"),
        pytest.param(64, 2_000, marks=slow, id="many"),
        pytest.param(64, DEFAULT_FILES, marks=nightly, id="many at the default"),
    ],
)
def test_every_save_is_durable_and_nothing_is_lost_or_wrong(
    processes: int, files: int, tmp_path: Path
) -> None:
    root, url = tmp_path / "tier", (tmp_path / "remote").as_uri()
    (tmp_path / "remote").mkdir()
    fill(root, files)
    options = {"url": url, "local_dir": str(root), "local_max_files": files}
    options |= {"lookup_timeout_s": 60.0, "exit_timeout_s": 60.0}
    counts = lived(options, processes)
    assert counts == {"failed": 0, "not durable": 0, "wrong": 0, "missed": 0}
    tier = DiskTier(root, max_bytes=1 << 34, max_files=files)
    assert tier.usage().files == len([*tier.objects()]) <= files
    assert tier.adopt() == []  # all is uploaded
    tier.close()
    elsewhere = Cache.open(url, local_dir=tmp_path / "other", lookup_timeout_s=60.0)
    try:
        for key in keys(0, processes * SAVES, "ours"):
            found = elsewhere.lookup(key)
            assert isinstance(found, Hit), (key, found)
            assert bytes(found.entry.data) == entry(key, SIZE)
    finally:
        elsewhere.close()
