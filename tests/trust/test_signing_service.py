"""A signer of the user's own is waited for so long, and no program is the worse for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from s3cache.cache import Hit, NotSaved, Saved
from s3cache.errors import ConfigError, UntrustedError
from s3cache.settings import Settings
from s3cache.store import MemoryStore
from s3cache.trust import Algorithm, SigningKey, TimeLimitedSigner, generate
from tests.support.caching import KEY, OTHER, entry, open_engine

MAIN = generate("ci-main")
SHARED = generate("ci-main", Algorithm.HMAC_SHA256)


class Service:
    """Signs, or does what it is asked to instead."""

    name = MAIN.name

    def __init__(self) -> None:
        self.asked = 0
        self.hangs = threading.Event()
        self.released = threading.Event()
        self.answer: Any = None

    def sign(self, message: bytes) -> Any:
        self.asked += 1
        if self.hangs.is_set():
            self.released.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or MAIN.sign(message)


@pytest.fixture
def service() -> Iterator[Service]:
    found = Service()
    yield found
    found.released.set()


class Sharing(Service):
    """Signs with a secret that readers have too."""

    algorithm = Algorithm.HMAC_SHA256

    def sign(self, message: bytes) -> bytes:
        return SHARED.sign(message)


@pytest.mark.parametrize(("kind", "key"), [(Service, MAIN), (Sharing, SHARED)])
def test_what_it_signs_is_as_good_as_by_the_key(kind: type[Service], key: SigningKey) -> None:
    assert TimeLimitedSigner(kind(), 30).sign(b"message") == key.sign(b"message")
    keys: dict[str, Any] = {"signing_key": kind(), "trusted_keys": key.public_text()}
    with open_engine(None, MemoryStore(), **keys) as engine:
        assert isinstance(engine.save(KEY, entry()), Saved)
        assert engine.flush(20).complete
        assert isinstance(engine.lookup(KEY), Hit)


@pytest.mark.parametrize("answer", [RuntimeError("no"), b"short", "text", 7])
def test_one_that_fails_signs_nothing_until_it_answers(service: Service, answer: Any) -> None:
    signer = TimeLimitedSigner(service, 30)
    service.answer = answer
    with pytest.raises(UntrustedError, match="ci-main"):
        signer.sign(b"message")
    service.answer = None
    assert signer.sign(b"message") == MAIN.sign(b"message")


def test_one_that_hangs_holds_one_thread_and_nobody(service: Service) -> None:
    signer = TimeLimitedSigner(service, 0.01)
    service.hangs.set()
    for _ in range(4):
        with pytest.raises(UntrustedError, match=r"has not answered|is not used until"):
            signer.sign(b"message")
    assert service.asked == 1


@pytest.mark.parametrize("trust", ["off", "prefer", "require"])
def test_what_is_not_signed_is_saved_where_the_policy_would_use_it(
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


def test_what_cannot_sign_is_refused() -> None:
    class Nameless(Service):
        name = "no name"

    class Unknown(Service):
        algorithm = 7

    for wrong in (Nameless(), Unknown()):
        with pytest.raises(ConfigError, match=r"signer"):
            open_engine(None, None, signing_key=wrong)
    with pytest.raises(ConfigError, match="give Signer or str"):
        Settings(signing_key=object())  # type: ignore[arg-type]
