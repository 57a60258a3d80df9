"""A bound on how long a signer of the user's own may take: a service that keeps the key, say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from s3cache.errors import ConfigError, UntrustedError
from s3cache.trust._keys import Signer
from s3cache.trust._signatures import Algorithm, check_name

__all__ = ["TimeLimitedSigner"]

# Not every one of the next graphs waits for a signer that was late once.
_REST_S = 60.0


class TimeLimitedSigner:
    """``signer``, waited for no longer than ``timeout_s``; any thread may use it.

    One that is late or fails is left alone for a minute. A call that never returns holds a thread,
    never more than one such, and the end of the program does not wait for it.

    Raises:
        ConfigError: it has no name or algorithm that a signature could bear.
    """

    def __init__(
        self,
        signer: Signer,
        timeout_s: float,
        *,
        rest_s: float = _REST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = check_name("signer's name", signer.name)
        if signer.algorithm not in Algorithm.__members__.values():
            raise ConfigError(
                f"signer {self.name!r}",
                f"has algorithm {signer.algorithm!r}",
                "give it one of s3cache.trust.Algorithm",
            )
        self.algorithm = Algorithm(signer.algorithm)
        self._signer = signer
        self._timeout_s = timeout_s
        self._rest_s = rest_s
        self._now = now
        self._rests_until = float("-inf")
        self._late: threading.Thread | None = None

    def sign(self, message: bytes) -> bytes:
        """The signature over ``message``.

        Raises:
            UntrustedError: there is none: it took too long, failed, or is no signature.
        """
        if self._now() < self._rests_until or (self._late is not None and self._late.is_alive()):
            raise self._unsigned("has failed a moment ago")
        answers: list[object] = []

        def ask() -> None:
            try:
                answers.append(self._signer.sign(message))
            except Exception as exc:  # noqa: BLE001 - of any library
                answers.append(exc)

        thread = threading.Thread(target=ask, name="s3cache-signer", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the interpreter exits, or there are too many
            raise self._failed(f"cannot be asked ({exc})") from exc
        thread.join(self._timeout_s)
        if not answers:
            self._late = thread
            raise self._failed(f"did not answer within {self._timeout_s:g} s")
        answer = answers[0]
        if isinstance(answer, Exception):
            raise self._failed(f"failed ({answer!r})") from answer
        if not isinstance(answer, bytes) or len(answer) != self.algorithm.size:
            raise self._failed(f"gave no {self.algorithm.size} bytes")
        return answer

    def _failed(self, how: str) -> UntrustedError:
        self._rests_until = self._now() + self._rest_s
        return self._unsigned(how)

    def _unsigned(self, how: str) -> UntrustedError:
        return UntrustedError("unsigned", f"signer {self.name!r} {how}")
