"""``python -m s3cache keygen``: the quick start, as a user follows it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from s3cache.trust import read_secret
from tests.support.marks import slow
from tests.support.scripts import python


def keygen(place: Path, *arguments: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return python("-m", "s3cache", "keygen", *arguments, cwd=place, umask=umask)


PROGRAM = """
import sys
from s3cache import Cache, frame
cache = Cache.open(sys.argv[1], local=False)
if sys.argv[2] == "save":
    cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    assert cache.flush(30).complete
else:
    found = cache.lookup("k")
    print(getattr(found, "tier", None) or found.reason)
cache.close()
"""


@pytest.mark.parametrize(
    ("shared", "umask"),
    [
        pytest.param([], 0o000, id="a pair"),
        pytest.param(["--shared"], 0o077, id="a shared secret"),
        pytest.param([], 0o077, id="a pair, private", marks=slow),
        pytest.param(["--shared"], 0o000, id="a shared secret, open", marks=slow),
    ],
)
def test_the_printed_settings_work_when_pasted(
    shared: list[str], umask: int, tmp_path: Path
) -> None:
    done = keygen(tmp_path, "ci-1", *shared, umask=umask)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "ci-1.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(str(path)).name == "ci-1"
    assert path.read_text().strip().partition(":")[2] not in done.stdout
    lines = done.stdout.splitlines()
    url = f"file://{tmp_path}/remote?create=1"

    def run(what: str, *settings: str) -> str:
        exports = "".join(f"export {each}\n" for each in settings)
        script = f'{exports}"{sys.executable}" -c "$PROGRAM" "{url}" {what}'
        environment = {**os.environ, "PROGRAM": PROGRAM}
        return subprocess.run(
            ["sh", "-ec", script], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    run("save", lines[0])
    assert run("read", lines[1]) == "remote"
    revoked = re.sub(".*: ", "", lines[2])
    assert run("read", lines[1], revoked) == "untrusted"
    other = keygen(tmp_path, "other", *shared).stdout.splitlines()
    assert run("read", other[1]) == "untrusted"


def test_nothing_is_overwritten_and_mistakes_are_named(tmp_path: Path) -> None:
    assert keygen(tmp_path, "ci", "--to", "ci.key").returncode == 0
    before = (tmp_path / "ci.key").read_text()
    for name, message in (("ci", "cannot be made (File exists)"), ("c i", "key name 'c i'")):
        done = keygen(tmp_path, name)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    assert (tmp_path / "ci.key").read_text() == before
