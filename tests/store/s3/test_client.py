"""Times in S3's answers, which a listing has thousands of."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from s3cache.store.s3._client import parse_time


@pytest.mark.parametrize(
    "text",
    ["Sat, 21 Nov 2026 08:11:22 GMT", "2026-11-21T08:11:22.000Z", "2026-11-21T08:11:22+00:00"],
)
def test_times_are_read_as_botocore_reads_them(text: str) -> None:
    assert parse_time(text) == datetime(2026, 11, 21, 8, 11, 22, tzinfo=timezone.utc)


def test_a_number_is_seconds_since_the_epoch() -> None:
    assert parse_time(0).timestamp() == 0
