"""Settings with where each came from, and whose entries they have us use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from s3cache.doctor._check import Check, fault, ok, warning
from s3cache.errors import ConfigError
from s3cache.settings import Settings, unknown_variables
from s3cache.store import parse_url
from s3cache.trust import VerifyKey, check_name, policy_of, signing_key_of

__all__ = ["check_settings", "check_trust"]


def check_settings(settings: Settings, url: str | None) -> Iterator[Check]:
    """Where each setting came from, and variables that nothing reads.

    Args:
        url: the one that was given as an argument, if any.
    """
    origins = []
    for field in fields(Settings):
        variable = f"S3CACHE_{field.name.upper()}"
        if field.name == "url" and url is not None:
            origin = "--url"
        elif os.environ.get(variable):
            origin = variable
        else:
            continue
        # Neither keys nor what may hold one.
        value = "" if not field.repr or field.name in ("url", "trusted_keys") else (
            f"={getattr(settings, field.name)}"
        )  # fmt: skip
        origins.append(f"{field.name}{value} from {origin}")
    yield ok("settings", "; ".join([*origins, "all others are defaults"]))
    for variable, hint in unknown_variables():
        yield warning("settings", f"environment variable {variable} is not known", hint)
    if settings.mode == "off":
        problem = "is off: nothing is looked up or saved"
        yield warning("mode", problem, "set mode=read-write", "disabled")
    if settings.url is None:
        yield warning(
            "remote", "there is none: nothing is shared with other machines", "set S3CACHE_URL"
        )
        return
    try:
        location = parse_url(settings.url)
    except ConfigError as exc:
        yield fault("remote", f"{exc.thing} {exc.cause}", exc.fix, "ConfigError")
        return
    yield ok("remote", location.identity.partition("?")[0])


def check_trust(settings: Settings) -> Iterator[Check]:
    """Whose entries are used, and whether those who trust as we do use what is saved here."""
    try:
        policy = policy_of(
            None if settings.trust == "auto" else settings.trust,
            settings.trusted_keys or "",
            settings.revoked or "",
            audience=check_name("option audience", settings.audience),
        )
        named = settings.signing_key or ""
        signer = signing_key_of(named) if isinstance(named, str) else None
    except ConfigError as exc:
        yield fault("trust", f"{exc.thing}: {exc.cause}", exc.fix, "ConfigError")
        return
    if policy.level == "off":
        yield warning(
            "trust",
            "no key is trusted: whoever can write to the bucket decides what its readers run",
            "s3cache keygen NAME, and docs/trust.md",
        )
    else:
        names = ", ".join(f"{each.key.name} for {each.audience}" for each in policy.trusted)
        yield ok("trust", f"{policy.level}: {names}")
    if signer is None:
        if policy.level == "require" and settings.mode in ("read-write", "write-only"):
            yield warning(
                "signing",
                "what is saved here is not signed, and nobody who trusts as you do uses it",
                "set signing_key, or mode=read-only",
                "untrusted",
            )
        return
    own = VerifyKey.parse(signer.public_text())
    is_known = any(
        each.key.fingerprint == own.fingerprint and each.audience == settings.audience
        for each in policy.trusted
    )
    if policy.level != "off" and (not is_known or own.fingerprint in policy.revoked_keys):
        yield fault(
            "signing",
            f"key {own.name} signs for {settings.audience} here, and is not trusted for that here: "
            "what is saved is a miss",
            f"add to trusted_keys: {settings.audience}={own.name}:..., as keygen printed it",
            "untrusted",
        )
    else:
        yield ok("signing", f"key {own.name} for {settings.audience}")
