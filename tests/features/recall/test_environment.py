"""The names of environment variables by which frames are compared."""

from __future__ import annotations

from s3cache.features.recall.candidate import Candidate
from s3cache.features.recall.content import ContentDescriber

HERE = {b"HOME": b"/root", b"ACT": b"relu"}


def test_variables_of_torch_and_s3cache_make_no_difference() -> None:
    added = {b"TORCHINDUCTOR_CACHE_DIR": b"x", b"S3CACHE_JOB": b"y", b"TRITON_CACHE_DIR": b"z"}
    contents = ContentDescriber()
    assert contents.of_environment({**added, **HERE}) == contents.of_environment(HERE)
    assert contents.of_environment({**HERE, b"K": b"1"}) != contents.of_environment(HERE)


def test_all_names_are_compared_if_a_guard_reads_all_keys() -> None:
    single = [["TYPE_MATCH", 3, [], {}, None], ["DICT_CONTAINS", 3, ["K"], {}, True]]
    assert not Candidate(guards=single).takes_all_of(3)
    assert Candidate(guards=[*single, ["DICT_KEYS_MATCH", 3, [], {}, None]]).takes_all_of(3)
    assert Candidate(guards=single, key_order=[3]).takes_all_of(3)
