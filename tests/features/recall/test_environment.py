"""The names of environment variables by which frames are compared."""

from __future__ import annotations

import os

import pytest

from s3cache.features.recall.candidate import Candidate
from s3cache.features.recall.content import ContentDescriber

HERE = {b"HOME": b"/root", b"ACT": b"relu"}


def test_variables_of_torch_and_s3cache_make_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = {b"TORCHINDUCTOR_CACHE_DIR": b"x", b"S3CACHE_JOB": b"y", b"TRITON_CACHE_DIR": b"z"}
    texts = []
    for table in (HERE, {**added, **HERE}, {**HERE, b"K": b"1"}):
        monkeypatch.setattr(os.environ, "_data", table)
        texts.append(ContentDescriber().by_single_keys(table))
    assert texts[0] == texts[1] != texts[2]


def test_all_names_are_compared_if_a_guard_reads_all_keys() -> None:
    single = [["TYPE_MATCH", 3, [], {}, None], ["DICT_CONTAINS", 3, ["K"], {}, True]]
    assert not Candidate(guards=single).takes_all_of(3)
    assert Candidate(guards=[*single, ["DICT_KEYS_MATCH", 3, [], {}, None]]).takes_all_of(3)
    assert Candidate(guards=single, key_order=[3]).takes_all_of(3)
