"""Keys from ``s3cache keygen`` work as a user follows the quick start; a user's signer may fail."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3cache.cache import Cache, Hit, NotSaved, Saved
from s3cache.cli import main
from s3cache.errors import ConfigError, UntrustedError
from s3cache.settings import Settings
from s3cache.store import MemoryStore
from s3cache.trust import Algorithm, SigningKey, TimeLimitedSigner, generate, read_secret
from tests.support.caching import KEY, OTHER, entry, open_engine

Keygen = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keygen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Keygen:
    """Return a function that calls the command, and returns its exit code and its output."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (main(["keygen", *arguments]), *capsys.readouterr())


def pasted(*lines: str) -> dict[str, str]:
    """Return the settings in the environment of a shell into which these lines were pasted."""
    script = "".join(f"export {each}\n" for each in lines)
    done = subprocess.run(
        ["sh", "-ec", f"{script}env -0"], capture_output=True, text=True, check=True
    )
    variables = (each.partition("=") for each in done.stdout.split("\0"))
    return {name: value for name, _, value in variables if name.startswith("S3CACHE_")}


@pytest.mark.parametrize(("shared", "umask"), [([], 0o000), (["--shared"], 0o077)])
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

    def outcome(*settings: str) -> str:
        with monkeypatch.context() as context:
            for name, value in pasted(*settings).items():
                context.setenv(name, value)
            with Cache.open(f"file://{tmp_path}/remote?create=1", local=False) as cache:
                if settings == (signs,):
                    cache.save(KEY, entry())
                    assert cache.flush(30).complete
                found = cache.lookup(KEY)
                return "remote" if isinstance(found, Hit) else str(found.reason)

    signs, trusts, revokes = out.splitlines()[:3]
    outcome(signs)
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


MAIN = generate("ci-main")
SHARED = generate("ci-main", Algorithm.HMAC_SHA256)


class Service:
    """A signer that can be made to hang, to raise or to return something else."""

    name = MAIN.name

    def __init__(self) -> None:
        self.calls = 0
        self.hangs, self.released = threading.Event(), threading.Event()
        self.answer: Any = None

    def sign(self, message: bytes) -> Any:
        self.calls += 1
        if self.hangs.is_set():
            self.released.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or MAIN.sign(message)


class Sharing(Service):
    """A signer with a secret that readers have too."""

    algorithm = Algorithm.HMAC_SHA256

    def sign(self, message: bytes) -> bytes:
        return SHARED.sign(message)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.released.set()


@pytest.mark.parametrize(("kind", "key"), [(Service, MAIN), (Sharing, SHARED)])
def test_a_signer_signs_as_its_key_does(kind: type[Service], key: SigningKey) -> None:
    assert TimeLimitedSigner(kind(), 30).sign(b"message") == key.sign(b"message")
    keys: dict[str, Any] = {"signing_key": kind(), "trusted_keys": key.public_text()}
    with open_engine(None, MemoryStore(), **keys) as engine:
        assert isinstance(engine.save(KEY, entry()), Saved)
        assert engine.flush(20).complete
        assert isinstance(engine.lookup(KEY), Hit)


def test_a_failing_signer_signs_nothing_until_it_answers(service: Service) -> None:
    signer = TimeLimitedSigner(service, 30)
    for answer in (RuntimeError("no"), b"short", "text", 7):
        service.answer = answer
        with pytest.raises(UntrustedError, match="ci-main"):
            signer.sign(b"message")
    service.answer = None
    assert signer.sign(b"message") == MAIN.sign(b"message")


def test_a_hanging_signer_holds_one_thread_and_no_caller(service: Service) -> None:
    signer = TimeLimitedSigner(service, 0.01)
    service.hangs.set()
    for _ in range(4):
        with pytest.raises(UntrustedError, match=r"has not answered|is not used until"):
            signer.sign(b"message")
    assert service.calls == 1


@pytest.mark.parametrize("trust", ["off", "prefer", "require"])
def test_an_unsigned_entry_is_saved_if_the_policy_would_use_it(
    service: Service, trust: str, caplog: pytest.LogCaptureFixture
) -> None:
    service.answer = RuntimeError("no")
    keys: dict[str, Any] = {"signing_key": service, "trusted_keys": MAIN.public_text()}
    engine = open_engine(None, MemoryStore(), trust=trust, **keys)
    with caplog.at_level(logging.WARNING, "s3cache"):
        saved = [engine.save(key, entry(key)) for key in (KEY, OTHER)]
    assert len(caplog.records) == 1
    assert "signer 'ci-main' failed" in caplog.text
    if trust == "require":
        assert all(isinstance(each, NotSaved) and each.reason == "untrusted" for each in saved)
    else:
        assert all(isinstance(each, Saved) for each in saved)
        assert engine.flush(20).complete
        assert isinstance(engine.lookup(KEY), Hit)
    engine.close()


def test_an_invalid_signer_is_refused() -> None:
    for changes in ({"name": "no name"}, {"algorithm": 7}):
        vars(wrong := Service()).update(changes)
        with pytest.raises(ConfigError, match=r"signer"):
            open_engine(None, None, signing_key=wrong)
    with pytest.raises(ConfigError, match="give Signer or str"):
        Settings(signing_key=object())  # type: ignore[arg-type]
