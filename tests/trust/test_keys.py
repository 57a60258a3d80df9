"""Keys and signatures, what they prove, and which entries are used because of them."""

from __future__ import annotations

import base64
import os
import string
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3cache import frame
from s3cache.errors import ConfigError, CorruptError, UntrustedError
from s3cache.trust import (
    MAX_SIGNATURES,
    Algorithm,
    Cause,
    Policy,
    Signature,
    SigningKey,
    Trusted,
    TrustMode,
    VerifyKey,
    generate,
    pack,
    parse_trusted,
    read_secret,
    sign,
    unpack,
)
from tests.support.forging import signed_by
from tests.support.frames import small_frame
from tests.support.scripts import modules_after

DIGEST = bytes(range(32))

# RFC 8032, 7.1, test 2.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNED = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def text(name: str, data: bytes) -> str:
    return f"{name}:{base64.b64encode(data).decode()}"


def signature(key: SigningKey, digest: bytes = DIGEST) -> Signature:
    return sign(digest, key, audience="main", issued_s=100, ttl_s=50)


def test_ed25519_matches_the_rfc() -> None:
    key = SigningKey.parse(text("rfc", SEED + PUBLIC))
    assert key.sign(b"\x72") == SIGNED
    assert key.public_text() == text("rfc", PUBLIC)
    assert key.secret_text() == text("rfc", SEED + PUBLIC)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_key_proves_only_what_its_pair_has_signed(algorithm: Algorithm) -> None:
    key, other = generate("ci", algorithm), generate("ci", algorithm)
    public = VerifyKey.parse(key.public_text())
    good = signature(SigningKey.parse(key.secret_text()))
    assert public.proves(good, DIGEST)
    assert not public.proves(good, bytes(32))
    assert not public.proves(signature(other), DIGEST)
    for bit in range(0, 8 * len(good.value), 7):
        value = bytearray(good.value)
        value[bit // 8] ^= 1 << bit % 8
        assert not public.proves(replace(good, value=bytes(value)), DIGEST)
    message = good.over(DIGEST)
    for cut in (b"", good.value[:-1], good.value + message[:1], good.value + message):
        assert not public.proves(replace(good, value=cut), DIGEST)
    renamed = VerifyKey.parse("other" + key.public_text().removeprefix("ci"))
    assert not renamed.proves(good, DIGEST)
    assert not any(
        public.proves(replace(good, algorithm=each), DIGEST) for each in {*Algorithm} - {algorithm}
    )


@pytest.mark.parametrize(
    "number",
    [
        1,  # the neutral point
        2**255 - 20,  # of order 2
        0,  # of order 4
        2**255 - 18,  # the neutral point, with y not reduced
        2**255 + 1,  # the neutral point, with an impossible sign
        2**256 - 1,
    ],
)
def test_a_key_of_small_order_proves_nothing(number: int) -> None:
    """With such a key, the signature of zero would hold for at least one message in eight."""
    public = VerifyKey.parse(text("ci", number.to_bytes(32, "little")))
    for beginning in {1, number, 2**255 - 20}:
        value = beginning.to_bytes(32, "little") + bytes(32)
        forged = replace(signature(generate("ci")), value=value)
        for message in range(64):
            assert not public.proves(forged, message.to_bytes(32, "big"))


def test_keys_do_not_reveal_their_secrets() -> None:
    key = generate("ci")
    secret = key.secret_text().partition(":")[2]
    assert secret not in repr(key)
    shared = generate("ci", Algorithm.HMAC_SHA256)
    for shown in (repr(shared), repr(VerifyKey.parse(shared.public_text()))):
        assert shared.secret_text().rpartition(":")[2] not in shown
        assert repr(shared._bytes) not in shown
    for parse in (SigningKey.parse, VerifyKey.parse):
        for damaged in (f"ci:{secret[:-9]}", f"ci:{secret}=!", f"ci:{secret}AAAA"):
            with pytest.raises(ConfigError) as caught:
                parse(damaged)
            assert secret[:8] not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "key", "message"),
    [
        (VerifyKey.parse, text("ci", SEED + PUBLIC), "64 bytes.*never the secret key"),
        (VerifyKey.parse, "ci:hmac-sha256:c2hvcnQ=", "5 bytes"),
        (SigningKey.parse, "ci:hmac-sha256:c2hvcnQ=", "5 bytes"),
        (VerifyKey.parse, "ci", "0 bytes"),
        (VerifyKey.parse, ":" + text("", PUBLIC), "name"),
        (VerifyKey.parse, text("c i", PUBLIC), "name"),
        (SigningKey.parse, text("ci", PUBLIC), "32 bytes.*give the secret key"),
        (SigningKey.parse, text("ci", SEED + SEED), "not a pair"),
    ],
)
def test_an_invalid_key_is_a_clear_error(parse: type, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(key)


# -- key files


@pytest.mark.parametrize("mode", [0o600, 0o440, 0o604, 0o644, 0o660, 0o602])
def test_a_key_that_others_may_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    key, path = generate("ci"), tmp_path / "key"
    path.write_text(key.secret_text() + "\n")
    path.chmod(mode)
    if mode in (0o600, 0o440):
        assert read_secret(str(path)) == key
    else:
        with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
            read_secret(str(path))


@pytest.mark.parametrize("content", [b"a" * 5000, b"\xff\xfe", b"", "a pipe", "a directory", None])
def test_an_invalid_key_file_is_a_clear_error(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if isinstance(content, bytes):
        path.write_bytes(content)
        path.chmod(0o600)
    elif content is not None:
        (os.mkfifo if content == "a pipe" else os.mkdir)(path, 0o600)
    message = "No such file" if content is None else "is not a file with a key"
    with pytest.raises(ConfigError, match=message):
        read_secret(str(path))


def test_no_library_is_imported_before_a_key_is_used() -> None:
    program = (
        "from s3cache import trust; "
        "key = trust.generate('a', trust.Algorithm.HMAC_SHA256); "
        "signed = trust.sign(bytes(32), key, audience='main', issued_s=1, ttl_s=0); "
        "assert trust.VerifyKey.parse(key.public_text()).proves(signed, bytes(32)); "
        f"trust.VerifyKey.parse({generate('a').public_text()!r}).fingerprint"
    )
    assert "nacl" not in modules_after(program)


# -- signatures as bytes

LETTERS = string.ascii_letters + string.digits
names = st.builds(
    lambda first, rest: first + rest,
    st.sampled_from(LETTERS),
    st.text(f"{LETTERS}._/@+-", max_size=127),
)
seconds = st.integers(0, 2**64 - 1)
signatures = st.sampled_from(Algorithm).flatmap(
    lambda algorithm: st.builds(
        *(Signature, names, names, seconds, seconds),
        st.binary(min_size=algorithm.size, max_size=algorithm.size),
        st.just(algorithm),
    )
)


@settings(max_examples=20)
@given(st.lists(signatures, max_size=3))
def test_packed_signatures_are_read_back(found: list[Signature]) -> None:
    assert unpack(pack(found)) == found


@given(st.binary(max_size=200))
def test_signatures_are_packed_to_the_bytes_they_were_read_from(data: bytes) -> None:
    """No two blocks mean the same, so no bytes can be hidden in a block."""
    try:
        found = unpack(data)
    except CorruptError:
        return
    assert pack(found) == data


def test_the_layout_is_the_documented_one() -> None:
    one = Signature("ci", "main", 7, 9, b"v" * 64)
    statement = struct.pack(">BBBBQQ", 1, 2, 4, 64, 7, 9) + b"cimain"
    assert pack([one]) == statement + b"v" * 64
    assert one.over(DIGEST) == b"s3cache entry signature 1\x00" + DIGEST + statement
    assert len(unpack(pack([one] * MAX_SIGNATURES))) == MAX_SIGNATURES
    with pytest.raises(CorruptError, match="more than 16"):
        unpack(pack([one] * (MAX_SIGNATURES + 1)))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ((3, 1, 1, 64), b"ab"),  # no such algorithm
        ((0, 1, 1, 64), b"ab"),
        ((1, 1, 1, 32), b"ab"),  # the size of another algorithm
        ((2, 1, 1, 64), b"ab"),
        ((1, 0, 1, 64), b"b"),
        ((1, 1, 0, 64), b"a"),
        ((1, 1, 1, 64), b"a\xff"),
        ((1, 1, 1, 64), b"\nb"),
        ((1, 1, 9, 64), b"ab"),
    ],
)
def test_an_invalid_statement_is_refused(fields: tuple[int, ...], names: bytes) -> None:
    block = struct.pack(">BBBBQQ", *fields, 0, 0) + names + bytes(fields[3])
    with pytest.raises(CorruptError, match="signatures"):
        unpack(block)


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
    revoked = replace(both, revoked_keys=frozenset({public(old).fingerprint}))
    assert [cause_of(entry(key), both) for key in (old, new)] == ["trusted"] * 2
    assert [cause_of(entry(key), revoked) for key in (old, new)] == ["revoked", "trusted"]


def test_trusted_keys_are_written_with_their_audience() -> None:
    text = f"{MAIN.public_text()}, pulls={PULLS.public_text()}\n main={SHARED.public_text()}"
    found = parse_trusted(text, audience="main")
    assert found == (*BOTH, Trusted("main", public(SHARED)))
    with pytest.raises(ConfigError, match="audience"):
        parse_trusted(f"a!b={MAIN.public_text()}", audience="main")


def test_different_policies_have_different_digests() -> None:
    """It covers trusted keys, audiences and revocations, but not their order."""
    both = Policy("require", BOTH)
    policies = [
        both,
        Policy("require", BOTH[:1]),
        Policy("require", (replace(BOTH[0], audience="pulls"),)),
        replace(both, revoked_keys=frozenset({"ab" * 16})),
        replace(both, revoked_digests=frozenset({bytes(32)})),
    ]
    assert len({policy.digest for policy in policies}) == len(policies)
    assert Policy("require", BOTH[::-1]).digest == both.digest


def test_a_policy_that_nothing_can_satisfy_is_refused() -> None:
    with pytest.raises(ConfigError, match="set trusted_keys"):
        Policy("require")
