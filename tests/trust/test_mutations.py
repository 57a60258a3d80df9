"""Signed frames that are changed at random are not accepted.

For more mutations: ``S3CACHE_TEST_MUTATIONS=1000000 make test ARGS="-k mutations"``. For a fuzzer
that sees which code they reach: ``tests/fuzz/run.sh``.
"""

from __future__ import annotations

import os
import random

import pytest

from s3cache.trust import Algorithm
from tests.support.forging import Forgery, Reader
from tests.support.marks import examples

COUNT = int(os.environ.get("S3CACHE_TEST_MUTATIONS", examples(40)))

pytestmark = pytest.mark.timeout(60 + COUNT / 100)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_no_mutation_is_accepted(algorithm: Algorithm) -> None:
    """This includes mutations with correct digests, which any attacker can compute."""
    reader = Reader(algorithm)
    forgery = Forgery((*reader.good, *reader.refused), random.Random(f"{algorithm} {COUNT}"))
    changed = 0
    for _ in range(COUNT):
        data = forgery.any()
        if data not in reader.good:
            changed += 1
            assert reader.admitted(data) is None
        assert reader.forgery(data) is None
    assert changed > COUNT * 0.9


@pytest.mark.parametrize("algorithm", Algorithm)
def test_other_signatures_beside_a_valid_one_may_be_anything(algorithm: Algorithm) -> None:
    """They prove nothing and take nothing away; the content is still what was signed."""
    reader = Reader(algorithm)
    forgery = Forgery(reader.ample, random.Random(f"{algorithm} {COUNT}"))
    taken = 0
    for _ in range(COUNT):
        data = forgery.any()
        taken += data not in reader.ample and reader.admitted(data) is not None
        assert reader.forgery(data) is None
    assert taken > 0


def test_a_reader_that_accepts_every_signature_is_caught() -> None:
    """So the tests above would have found a forgery."""
    reader = Reader(Algorithm.ED25519)
    forgery = Forgery(reader.good, random.Random(1))
    reader.judge = lambda _digest, _block: None
    assert any(reader.forgery(forgery.any()) for _ in range(100))
