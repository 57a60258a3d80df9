"""Keys: written down, read back, kept from others, and good for nothing but what they are for."""

from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ConfigError
from s3cache.trust import Algorithm, Signature, SigningKey, VerifyKey, generate, read_secret, sign

if TYPE_CHECKING:
    from pathlib import Path

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


def test_ed25519_is_that_of_the_rfc() -> None:
    key = SigningKey.parse(text("rfc", SEED + PUBLIC))
    assert key.sign(b"\x72") == SIGNED
    assert key.public_text() == text("rfc", PUBLIC)
    assert key.secret_text() == text("rfc", SEED + PUBLIC)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_key_proves_what_its_pair_has_signed_and_nothing_else(algorithm: Algorithm) -> None:
    key, other = generate("ci", algorithm), generate("ci", algorithm)
    public = VerifyKey.parse(key.public_text())
    good = signature(SigningKey.parse(key.secret_text()))
    assert public.proves(good, DIGEST)
    assert not public.proves(good, bytes(32))
    assert not public.proves(signature(other), DIGEST)
    for bit in range(0, 8 * len(good.value), 7):
        value = bytearray(good.value)
        value[bit // 8] ^= 1 << bit % 8
        assert not public.proves(Signature(good.statement, bytes(value)), DIGEST)
    message = good.statement.over(DIGEST)
    for cut in (b"", good.value[:-1], good.value + message[:1], good.value + message):
        assert not public.proves(Signature(good.statement, cut), DIGEST)
    renamed = VerifyKey.parse("other" + key.public_text().removeprefix("ci"))
    assert not renamed.proves(good, DIGEST)


ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point: RFC 8032, 5.1
NEUTRAL = (1).to_bytes(32, "little")


@pytest.mark.parametrize(
    "point",
    [
        NEUTRAL,
        (2**255 - 20).to_bytes(32, "little"),  # of order 2
        bytes(32),  # of order 4
        (2**255 - 18).to_bytes(32, "little"),  # the neutral one, its y not reduced
        (2**255 + 1).to_bytes(32, "little"),  # ... with a sign that it cannot have
        b"\xff" * 32,
    ],
)
def test_a_key_that_anybody_could_sign_for_proves_nothing(point: bytes) -> None:
    """With a key of small order, the signature of zero holds for one message in eight or more."""
    public = VerifyKey.parse(text("ci", point))
    statement = signature(generate("ci")).statement
    for beginning in {NEUTRAL, point, (2**255 - 20).to_bytes(32, "little")}:
        forged = Signature(statement, beginning + bytes(32))
        for number in range(64):
            assert not public.proves(forged, number.to_bytes(32, "big"))


def test_keys_keep_their_secrets() -> None:
    key = generate("ci")
    secret = key.secret_text().partition(":")[2]
    assert secret not in repr(key)
    assert secret not in repr(VerifyKey.parse(key.public_text()))
    for parse in (SigningKey.parse, VerifyKey.parse):
        for damaged in (f"ci:{secret[:-9]}", f"ci:{secret}=!", f"ci:{secret}AAAA"):
            with pytest.raises(ConfigError) as caught:
                parse(damaged)
            assert secret[:8] not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "key", "message"),
    [
        (VerifyKey.parse, text("ci", SEED + PUBLIC), "readers must not have"),
        (VerifyKey.parse, text("ci", SEED[:-1]), "31 bytes"),
        (VerifyKey.parse, "ci:hmac-sha256:c2hvcnQ=", "5 bytes"),
        (VerifyKey.parse, "ci", "0 bytes"),
        (VerifyKey.parse, ":" + text("", PUBLIC), "name"),
        (VerifyKey.parse, text("c i", PUBLIC), "name"),
        (SigningKey.parse, text("ci", PUBLIC), "is a public one"),
        (SigningKey.parse, text("ci", SEED + SEED), "no pair"),
        (SigningKey.parse, text("ci", SEED * 3), "96 bytes"),
    ],
)
def test_what_is_no_key_is_named(parse: type, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(key)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_key_is_read_from_a_file_of_its_owners(mode: int, tmp_path: Path) -> None:
    key, path = generate("ci"), tmp_path / "key"
    path.write_text(key.secret_text() + "\n")
    path.chmod(mode)
    assert read_secret(str(path)) == key


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602, 0o777])
def test_a_key_that_others_may_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(generate("ci").secret_text())
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        read_secret(str(path))


def test_what_is_no_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="is no file with a key"):
        read_secret(str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(ConfigError, match="is no file with a key"):
        read_secret(str(fifo))
    large = tmp_path / "large"
    large.write_bytes(b"a" * 5000)
    large.chmod(0o600)
    with pytest.raises(ConfigError, match="is no file with a key"):
        read_secret(str(large))
    large.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no file with a key"):
        read_secret(str(large))
    assert stat.S_IMODE(large.stat().st_mode) == 0o600


def test_no_library_is_imported_before_a_key_is_used() -> None:
    program = (
        "import sys, s3cache.trust as trust\n"
        "key = trust.generate('a', trust.Algorithm.HMAC_SHA256)\n"
        "signed = trust.sign(bytes(32), key, audience='main', issued_s=1, ttl_s=0)\n"
        "assert trust.VerifyKey.parse(key.public_text()).proves(signed, bytes(32))\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'nacl'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
