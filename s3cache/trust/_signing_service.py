"""Limit how long a signer of the user's own may take, such as a service that keeps the key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from s3cache.errors import CircuitOpenError, ConfigError, UntrustedError
from s3cache.trust._keys import Signer
from s3cache.trust._signatures import Algorithm, check_name
from s3cache.util.breaker import Breaker

__all__ = ["TimeLimitedSigner"]

# So that not every one of the next graphs waits for a signer that was late once.
_REST_S = 60.0


class TimeLimitedSigner:
    """Waits for ``signer`` no longer than ``timeout_s``; any thread may use it.

    A signer that is late or fails is left alone for a minute. A call that never returns holds a
    thread, never more than one such, and the end of the program does not wait for it.

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
        self._breaker = Breaker(1, rest_s, clock=now)
        self._late: threading.Thread | None = None

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``.

        Raises:
            UntrustedError: there is none: it took too long, failed, or is no signature.
        """
        try:
            if self._late is not None and self._late.is_alive():
                raise CircuitOpenError("the last call has not ended")
            is_probe = self._breaker.enter()
        except CircuitOpenError:
            how = f"is skipped (it failed less than {self._rest_s:g} s ago)"
            raise UntrustedError("unsigned", f"signer {self.name!r} {how}") from None
        try:
            signature = self._ask(message)
        except UntrustedError:
            self._breaker.fail(is_probe)
            raise
        self._breaker.succeed(is_probe)
        return signature

    def _ask(self, message: bytes) -> bytes:
        answers: list[object] = []

        def ask() -> None:
            try:
                answers.append(self._signer.sign(message))
            except Exception as exc:  # noqa: BLE001 - of any library
                answers.append(exc)

        def failed(how: str) -> UntrustedError:
            return UntrustedError("unsigned", f"signer {self.name!r} {how}")

        thread = threading.Thread(target=ask, name="s3cache-signer", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the interpreter exits, or there are too many
            raise failed(f"cannot be asked ({exc})") from exc
        thread.join(self._timeout_s)
        if not answers:
            self._late = thread
            raise failed(f"did not answer within {self._timeout_s:g} s")
        answer = answers[0]
        if isinstance(answer, Exception):
            raise failed(f"failed ({answer!r})") from answer
        if not isinstance(answer, bytes) or len(answer) != self.algorithm.size:
            raise failed(f"gave no {self.algorithm.size} bytes")
        return answer
