"""Which entries are used, by signer, audience, expiry and revocation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from s3cache import frame
from s3cache.errors import ConfigError, UntrustedError
from s3cache.trust import (
    Algorithm,
    Cause,
    Policy,
    SigningKey,
    Trusted,
    TrustMode,
    VerifyKey,
    generate,
    parse_trusted,
)
from tests.support.forging import signed_by
from tests.support.frames import small_frame

NOW = 1_800_000_000
MAIN, PULLS, STRANGER = generate("ci-main"), generate("ci-pulls"), generate("stranger")
SHARED = generate("team", Algorithm.HMAC_SHA256)


def public(key: SigningKey) -> VerifyKey:
    return VerifyKey.parse(key.public_text())


BOTH = (Trusted("main", public(MAIN)), Trusted("pulls", public(PULLS)))


DIGESTS = frozenset({frame.decode(small_frame()).digest})


def policy(level: TrustMode = "require", **changes: Any) -> Policy:
    return replace(Policy(level, BOTH[:1], now=lambda: NOW), **changes)


def entry(*keys: SigningKey, issued_s: int = NOW, **how: Any) -> bytes:
    return signed_by(small_frame(), *keys, issued_s=issued_s, **how) if keys else small_frame()


def cause_of(data: bytes, judged_by: Policy) -> Cause | str:
    try:
        frame.decode(data, admit=judged_by.check)
    except UntrustedError as exc:
        return exc.cause
    return "trusted"


@pytest.mark.parametrize(
    ("data", "changes", "cause"),
    [
        (entry(MAIN), {}, "trusted"),
        (entry(STRANGER, MAIN), {}, "trusted"),
        (entry(), {}, "unsigned"),
        (entry(STRANGER), {}, "unknown-key"),
        (entry(PULLS, audience="main"), {}, "unknown-key"),
        (entry(PULLS, audience="main"), {"trusted": BOTH}, "other-audience"),
        (entry(PULLS, audience="pulls"), {"trusted": BOTH}, "trusted"),
        (entry(MAIN, audience="pulls"), {"trusted": BOTH}, "other-audience"),
        (entry(MAIN, issued_s=NOW - 50, ttl_s=50), {}, "expired"),
        (entry(MAIN, issued_s=NOW - 50, ttl_s=51), {}, "trusted"),
        (entry(MAIN, issued_s=NOW + 3601), {}, "expired"),
        (entry(MAIN), {"revoked_keys": frozenset({public(MAIN).fingerprint})}, "revoked"),
        # A new signature, or none, does not undo the revocation of a digest.
        (entry(MAIN), {"revoked_digests": DIGESTS}, "revoked"),
        (entry(), {"revoked_digests": DIGESTS, "level": "prefer"}, "revoked"),
        (entry(generate("ci-main")), {}, "bad-signature"),
        (entry(SHARED), {"trusted": (Trusted("main", public(SHARED)),)}, "trusted"),
        (entry(), {"level": "prefer"}, "trusted"),
        (entry(STRANGER), {"level": "prefer"}, "trusted"),
        (entry(generate("ci-main")), {"level": "prefer"}, "bad-signature"),
        (entry(MAIN, issued_s=NOW - 50, ttl_s=50), {"level": "prefer"}, "expired"),
        (entry(MAIN, audience="pulls"), {"level": "prefer"}, "other-audience"),
    ],
)
def test_which_entries_are_trusted(data: bytes, changes: dict[str, Any], cause: str) -> None:
    assert cause_of(data, policy(**changes)) == cause
    assert cause_of(data, Policy()) == "trusted"  # trust is off


def test_a_name_may_have_several_keys_for_rotation() -> None:
    old, new = generate("ci-main"), generate("ci-main")
    both = policy(trusted=(Trusted("main", public(old)), Trusted("main", public(new))))
    assert {cause_of(entry(key), both) for key in (old, new)} == {"trusted"}
    revoked = replace(both, revoked_keys=frozenset({public(old).fingerprint}))
    assert [cause_of(entry(key), revoked) for key in (old, new)] == ["revoked", "trusted"]


def test_trusted_keys_are_written_with_their_audience() -> None:
    text = f"{MAIN.public_text()}, pulls={PULLS.public_text()}\n main={SHARED.public_text()}"
    found = parse_trusted(text, audience="main")
    assert [(each.audience, each.key) for each in found] == [
        ("main", public(MAIN)),
        ("pulls", public(PULLS)),
        ("main", public(SHARED)),
    ]
    with pytest.raises(ConfigError, match="audience"):
        parse_trusted(f"a!b={MAIN.public_text()}", audience="main")


def test_different_policies_have_different_digests() -> None:
    """It covers trusted keys, audiences and revocations, but not their order."""
    both = f"{MAIN.public_text()} {SHARED.public_text()}"
    texts = [both, MAIN.public_text(), f"pulls={MAIN.public_text()}"]
    policies = [Policy("require", parse_trusted(text, audience="main")) for text in texts]
    policies += [
        replace(policies[0], revoked_keys=frozenset({"ab" * 16})),
        replace(policies[0], revoked_digests=frozenset({bytes(32)})),
    ]
    assert len({policy.digest for policy in policies}) == len(policies)
    turned = Policy("require", policies[0].trusted[::-1])
    assert turned.digest == policies[0].digest
    assert replace(turned, revoked_keys=frozenset()).digest == turned.digest
