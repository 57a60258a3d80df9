"""Whose entries are used here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from s3cache.errors import ConfigError, CorruptError, UntrustedError
from s3cache.trust._keys import VerifyKey
from s3cache.trust._signatures import Algorithm, Signature, check_name, unpack

__all__ = [
    "AUDIENCE",
    "Cause",
    "Level",
    "Policy",
    "Trusted",
    "for_audience",
    "parse_trusted",
]

#: For whom is signed where nothing is said.
AUDIENCE: Final = "main"

Level: TypeAlias = Literal["off", "prefer", "require"]

#: Why an entry is not trusted; of several signatures the last of these that is true of one.
Cause: TypeAlias = Literal[
    "unsigned", "unknown-key", "other-audience", "expired", "revoked", "bad-signature"
]
_CAUSES: Final[tuple[Cause, ...]] = (
    "unsigned",
    "unknown-key",
    "other-audience",
    "expired",
    "revoked",
    "bad-signature",
)
# Clocks differ: a signature may have been made so much later than it is here now.
_SKEW_S: Final = 3600


@dataclass(frozen=True)
class Trusted:
    """A key, and what it may sign for."""

    audience: str
    key: VerifyKey


def parse_trusted(text: str, *, audience: str) -> tuple[Trusted, ...]:
    """Keys as settings have them: ``audience=name:base64``, apart by spaces or commas.

    Args:
        audience: of keys that are written without one.

    Raises:
        ConfigError: one is no key.
    """
    found = []
    for word in for_audience(text, audience).split():
        before, _, after = word.partition("=")
        found.append(Trusted(check_name("audience", before), VerifyKey.parse(after)))
    return tuple(found)


def for_audience(text: str, audience: str) -> str:
    """The same keys, each with its audience: that one, where it is written without."""
    # The padding of base64 is an equals sign too: an audience has no colon before its own.
    return " ".join(
        word if "=" in word and ":" not in word.partition("=")[0] else f"{audience}={word}"
        for word in text.replace(",", " ").split()
    )


@dataclass(frozen=True)
class Policy:
    """What makes an entry trusted here.

    Attributes:
        level: ``require`` uses nothing that no trusted key signed; ``prefer`` uses what nobody
            signed, or nobody known here, but nothing that is signed wrongly; ``off`` does not look.
        trusted: keys with what each may sign for.
        revoked_keys: fingerprints of keys whose signatures are worth nothing, whenever made.
        revoked_digests: of single entries.
        now: Unix time in seconds.
    """

    level: Level = "off"
    trusted: tuple[Trusted, ...] = ()
    revoked_keys: frozenset[str] = frozenset()
    revoked_digests: frozenset[bytes] = frozenset()
    now: Callable[[], float] = field(default=time.time, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.level == "require" and not self.trusted:
            raise ConfigError(
                "setting trust",
                "is 'require', and no key is trusted: nothing could be used",
                "set trusted_keys",
            )

    @property
    def judges(self) -> bool:
        """Whether anything may come of :meth:`judge` but leave."""
        return self.level != "off"

    @property
    def takes_long(self) -> bool:
        """Whether :meth:`judge` may take as long as reading a large entry from memory.

        An Ed25519 signature that it meets first does, a MAC does not.
        """
        return self.judges and any(each.key.algorithm is Algorithm.ED25519 for each in self.trusted)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell whom it trusts, and what it has revoked."""
        parts = sorted(
            f"{each.audience}={each.key.name}:{each.key.fingerprint}" for each in self.trusted
        )
        parts += sorted(self.revoked_keys) + sorted(each.hex() for each in self.revoked_digests)
        return hashlib.sha256(" ".join([self.level, *parts]).encode()).hexdigest()[:16]

    def judge(self, digest: bytes, block: bytes) -> Signature | None:
        """Decide whether the entry with that digest is used; nothing else of it was looked at.

        Args:
            block: its signatures, as they lie in it; empty where there are none.

        Returns:
            The signature that makes it trusted; ``None`` where none is asked for.

        Raises:
            UntrustedError: it is not used.
        """
        if self.level == "off":
            return None
        if digest in self.revoked_digests:
            raise UntrustedError("revoked", "this very entry is on the list of revoked ones")
        try:
            signatures = unpack(block)
        except CorruptError as exc:
            raise UntrustedError("bad-signature", str(exc)) from None
        found: dict[Cause, str] = {"unsigned": "nobody signed it"}
        for signature in signatures:
            verdict = self._verdict(signature, digest)
            if verdict is None:
                return signature
            statement = signature.statement
            found[verdict] = f"signed by {statement.signer!r} for {statement.audience!r}"
        cause = max(found, key=_CAUSES.index)
        if self.level == "prefer" and cause in ("unsigned", "unknown-key"):
            return None
        raise UntrustedError(cause, found[cause])

    def _verdict(self, signature: Signature, digest: bytes) -> Cause | None:
        """What is wrong with it, if anything is.

        It is proven first: what it says of itself means nothing before.
        """
        statement = signature.statement
        named = [each for each in self.trusted if each.key.name == statement.signer]
        if not named:
            return "unknown-key"
        proving = [each for each in named if each.key.proves(signature, digest)]
        if not proving:
            return "bad-signature"
        valid = [each for each in proving if each.key.fingerprint not in self.revoked_keys]
        if not valid:
            return "revoked"
        if all(each.audience != statement.audience for each in valid):
            return "other-audience"
        now = self.now()
        if statement.issued_s > now + _SKEW_S or 0 < statement.expires_s <= now:
            return "expired"
        return None


def strongest(levels: Iterable[Level | None], otherwise: Level) -> Level:
    """The level that asks for most of those that are set; ``otherwise`` if none is."""
    order: Mapping[Level, int] = {"off": 0, "prefer": 1, "require": 2}
    given = [level for level in levels if level is not None]
    return max(given, key=lambda level: order[level]) if given else otherwise
