"""Coverage-guided fuzzing of the frame's reader and of signatures, with atheris (libFuzzer).

    FUZZ_TIME=600 tests/fuzz/run.sh
    python tests/fuzz/fuzz.py frame --write-seeds DIR    or: signed
    python tests/fuzz/fuzz.py frame -max_total_time=60 DIR

Digests reject nearly all inputs of a fuzzer, so each input is tried three times: unchanged, with a
correct digest of the prelude, and with correct digests of the sections too.

frame
    No input may raise an error other than CorruptError. A frame that can be read must be equal
    after it is written and read again. Its signatures must be packed to the same bytes, or raise
    CorruptError.
signed
    A reader that requires signatures accepts no unsigned frame. Inputs are mutations of signed
    frames, some of them signed for others. libFuzzer and ``tests/support/forging.py`` mutate them
    in turn.

It needs atheris, msgpack, zstandard and pynacl, not torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys

import atheris

with atheris.instrument_imports(include=["s3cache"]):
    from s3cache.errors import CorruptError
    from s3cache.frame import decode, decode_head, encode, signed
    from s3cache.trust import Algorithm, generate, pack, sign, unpack
    from tests.support.forging import Forgery, Reader, encoded, with_right_digests

READERS = {algorithm: Reader(algorithm) for algorithm in Algorithm}
SIGNED = tuple(
    data for each in READERS.values() for data in (*each.good, *each.ample, *each.refused)
)


def small_frames() -> list[bytes]:
    """Return small valid frames that together use every part of the grammar."""
    text = b"the same words over and over; " * 20
    values: dict[str, object] = {
        "n": None,
        "i": -1,
        "f": 0.5,
        "s": "ü",
        "b": b"\0",
        "l": [[True]],
        "d": {"": {}},
    }
    cases: list[dict[str, object]] = [
        {"sections": {"text": text, "small": b"x"}, "meta": values, "schema": 3},
        {"sections": {}},
        {"sections": {"a": b"abc", "b": b""}, "codec": "none"},
        {"sections": {"text": text}, "variant": "v"},
    ]
    frames = [encode(kind="fuzz", key="k", created_ns=1, **case) for case in cases]  # type: ignore[arg-type]
    key = generate("ci", Algorithm.HMAC_SHA256)
    for count in (1, 3):
        block = [sign(decode(frames[0]).digest, key, audience="main", issued_s=1, ttl_s=0)] * count
        frames.append(signed(decode(frames[0]), lambda _, block=block: pack(block)))  # type: ignore[misc]
    return frames


def read(data: bytes) -> None:
    with contextlib.suppress(CorruptError):
        decode_head(data)
    try:
        found = decode(data)
        sections = {name: bytes(found.section(name)) for name in found.names}
        assert pack(unpack(found.signatures)) == found.signatures
    except CorruptError:
        return
    again = decode(encoded(found, sections))
    # repr, because NaN does not equal itself.
    assert repr(again.header.meta) == repr(found.header.meta)
    assert {name: bytes(again.section(name)) for name in again.names} == sections


def try_frame(data: bytes) -> None:
    for each in with_right_digests(data):
        read(each)


def try_signed(data: bytes) -> None:
    for algorithm, reader in READERS.items():
        found = reader.forgery(data)
        assert found is None, f"{algorithm.name} reader took {found!r}"


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Return the input mutated by libFuzzer or by ``Forgery``."""
    if seed % 2 or len(data) < 100:
        return bytes(atheris.Mutate(data, max_size))
    return Forgery(SIGNED, random.Random(seed)).changed(data)[:max_size]


def main() -> None:
    is_frame = sys.argv.pop(1) == "frame"
    if sys.argv[1] == "--write-seeds":
        os.makedirs(sys.argv[2], exist_ok=True)
        for number, data in enumerate(small_frames() if is_frame else SIGNED):
            with open(os.path.join(sys.argv[2], f"frame {number}"), "wb") as file:
                file.write(data)
        return
    options = {} if is_frame else {"custom_mutator": mutated}
    atheris.Setup(sys.argv, try_frame if is_frame else try_signed, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
