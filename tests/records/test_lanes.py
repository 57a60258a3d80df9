"""Spans in lanes, in which no two overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from s3cache.records import Lanes

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)))


@given(SPANS)
def test_no_two_spans_of_a_lane_overlap_in_any_order(spans: list[tuple[int, int]]) -> None:
    lanes = Lanes()
    taken: dict[int, list[tuple[int, int]]] = {}
    for began, length in spans:
        span = began, began + length
        taken.setdefault(lanes.take(*span), []).append(span)
    for lane in taken.values():
        for number, (began, ended) in enumerate(lane):
            assert all(ended <= b or e <= began for b, e in lane[:number])


@given(SPANS)
def test_in_order_there_are_as_many_lanes_as_spans_at_once(
    spans: list[tuple[int, int]],
) -> None:
    lanes = Lanes()
    used = {lanes.take(began, began + length) for began, length in sorted(spans)}
    at_once = [sum(b <= moment < b + length for b, length in spans) for moment in range(40)]
    assert len(used) == max(at_once)


def test_a_span_that_begins_when_another_ends_takes_its_lane() -> None:
    lanes = Lanes()
    assert [lanes.take(0, 1), lanes.take(1, 2), lanes.take(1.5, 3)] == [0, 0, 1]
