"""``python -m s3cache keygen``: the quick start, as a user follows it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache.cache import Cache, Hit
from s3cache.cli import main
from s3cache.trust import read_secret
from tests.support.caching import KEY, entry

Keygen = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keygen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Keygen:
    """Return a function that calls the command, and returns its exit code and its output."""
    monkeypatch.chdir(tmp_path)

    def keygen(*arguments: str) -> tuple[int, str, str]:
        code = main(["keygen", *arguments])
        written = capsys.readouterr()
        return code, written.out, written.err

    return keygen


def pasted(*lines: str) -> dict[str, str]:
    """Return the settings in the environment of a shell into which these lines were pasted."""
    script = "".join(f"export {each}\n" for each in lines)
    done = subprocess.run(
        ["sh", "-ec", f"{script}env -0"], capture_output=True, text=True, check=True
    )
    variables = (each.partition("=") for each in done.stdout.split("\0"))
    return {name: value for name, _, value in variables if name.startswith("S3CACHE_")}


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("shared", [[], ["--shared"]], ids=["a pair", "a shared secret"])
def test_the_printed_settings_work_when_pasted(
    shared: list[str], umask: int, keygen: Keygen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(umask)
    try:
        code, out, err = keygen("ci-1", *shared)
    finally:
        os.umask(before)
    assert (code, err) == (0, "")
    path = tmp_path / "ci-1.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(str(path)).name == "ci-1"
    assert path.read_text().strip().partition(":")[2] not in out

    def outcome(*settings: str, saves: bool = False) -> str:
        with monkeypatch.context() as context:
            for name, value in pasted(*settings).items():
                context.setenv(name, value)
            with Cache.open(f"file://{tmp_path}/remote?create=1", local=False) as cache:
                if saves:
                    cache.save(KEY, entry())
                    assert cache.flush(30).complete
                found = cache.lookup(KEY)
                return "remote" if isinstance(found, Hit) else str(found.reason)

    signs, trusts, revokes = out.splitlines()[:3]
    outcome(signs, saves=True)
    assert outcome(trusts) == "remote"
    assert outcome(trusts, re.sub(".*: ", "", revokes)) == "untrusted"
    assert outcome(keygen("other", *shared)[1].splitlines()[1]) == "untrusted"


def test_nothing_is_overwritten_and_mistakes_are_named(keygen: Keygen, tmp_path: Path) -> None:
    assert keygen("ci", "--to", "ci.key")[0] == 0
    before = (tmp_path / "ci.key").read_text()
    for name, message in (("ci", "cannot be made (File exists)"), ("c i", "key name 'c i'")):
        code, out, err = keygen(name)
        assert (code, out) == (2, "")
        assert message in err
    assert (tmp_path / "ci.key").read_text() == before
