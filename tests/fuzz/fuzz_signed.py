"""Fuzz signed frames: a reader that requires signatures accepts no unsigned frame.

    FUZZ_TIME=600 tests/fuzz/run.sh    or: python tests/fuzz/fuzz_signed.py -max_total_time=600 DIR
    python tests/fuzz/fuzz_signed.py --write-seeds DIR

Inputs are mutations of signed frames, some of them signed for others. libFuzzer and
``tests/support/forging.py`` mutate them in turn. Readers of both algorithms try each input
unchanged, with a correct digest of the prelude, and with correct digests of the sections too.

It needs atheris, msgpack, zstandard and pynacl, not torch.
"""

from __future__ import annotations

import os
import random
import sys

import atheris

with atheris.instrument_imports(include=["s3cache"]):
    from s3cache.trust import Algorithm
    from tests.support.forging import Forgery, Reader

READERS = {algorithm: Reader(algorithm) for algorithm in Algorithm}
FRAMES = tuple(
    data for each in READERS.values() for data in (*each.good, *each.ample, *each.refused)
)


def try_one_input(data: bytes) -> None:
    for algorithm, reader in READERS.items():
        found = reader.forgery(data)
        assert found is None, f"{algorithm.name} reader took {found!r}"


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Return the input mutated by libFuzzer or by ``Forgery``."""
    if seed % 2 or len(data) < 100:
        return bytes(atheris.Mutate(data, max_size))
    return Forgery(FRAMES, random.Random(seed)).changed(data)[:max_size]


def main() -> None:
    if sys.argv[1:2] == ["--write-seeds"]:
        os.makedirs(sys.argv[2], exist_ok=True)
        for number, data in enumerate(FRAMES):
            with open(os.path.join(sys.argv[2], f"frame {number}"), "wb") as file:
                file.write(data)
        return
    atheris.Setup(sys.argv, try_one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
