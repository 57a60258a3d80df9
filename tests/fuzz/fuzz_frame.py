"""Coverage-guided fuzzing of the frame's reader, with atheris (libFuzzer).

    python tests/fuzz/fuzz_frame.py --write-seeds build/fuzz/frame
    python tests/fuzz/fuzz_frame.py -max_total_time=60 build/fuzz/frame

Digests reject nearly all inputs of a fuzzer, so each input is tried three times: unchanged, with a
correct digest of the prelude, and with correct digests of the sections too. No input may raise an
error other than CorruptError. A frame that can be read must be equal after it is written and read
again. Its signatures must be packed to the same bytes, or raise CorruptError.

It needs atheris, msgpack and zstandard, not torch.
"""

from __future__ import annotations

import contextlib
import os
import sys

import atheris

with atheris.instrument_imports(include=["s3cache"]):
    from s3cache.errors import CorruptError
    from s3cache.frame import PRELUDE_BYTES, decode, decode_head, encode, signed
    from s3cache.trust import Algorithm, generate, pack, sign, unpack
    from tests.support.forging import encoded, resealed, split, with_section_digests


def seeds() -> dict[str, bytes]:
    """Return small valid frames that together use every part of the grammar."""
    text = b"the same words over and over; " * 20
    meta: dict[str, object] = {
        "n": None,
        "i": -1,
        "f": 0.5,
        "s": "ü",
        "b": b"\0",
        "l": [[True]],
        "d": {"": {}},
    }
    cases: dict[str, dict[str, object]] = {
        "empty": {"sections": {}},
        "stored": {"sections": {"a": b"abc", "b": b""}, "codec": "none"},
        "zstd": {"sections": {"text": text}, "variant": "v"},
        "mixed": {"sections": {"text": text, "small": b"x"}, "meta": meta, "schema": 3},
    }
    frames = {
        name: encode(kind="fuzz", key="k", created_ns=1, **arguments)  # type: ignore[arg-type]
        for name, arguments in cases.items()
    }
    key = generate("ci", Algorithm.HMAC_SHA256)
    for count in (1, 3):
        frames[f"signed {count}"] = signed(
            decode(frames["mixed"]),
            lambda digest, count=count: pack(  # type: ignore[misc]
                [sign(digest, key, audience="main", issued_s=1, ttl_s=0)] * count
            ),
        )
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


def try_one_input(data: bytes) -> None:
    read(data)
    if len(data) < PRELUDE_BYTES:
        return
    signatures, header, payload = split(data)
    read(resealed(signatures, header, payload))
    with contextlib.suppress(Exception):
        header = with_section_digests(header, payload)
    read(resealed(signatures, header, payload))


def main() -> None:
    if sys.argv[1:2] == ["--write-seeds"]:
        os.makedirs(sys.argv[2], exist_ok=True)
        for name, data in seeds().items():
            with open(os.path.join(sys.argv[2], name), "wb") as file:
                file.write(data)
        return
    atheris.Setup(sys.argv, try_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
