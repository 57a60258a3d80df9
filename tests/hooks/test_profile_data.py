"""A shape profile is unchanged after a round trip, and other data is refused."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3cache import frame
from s3cache.artifact import SCHEMA
from s3cache.errors import CorruptError
from s3cache.frame import Frame
from s3cache.hooks._profiles import Profile

flags = st.none() | st.lists(st.booleans(), max_size=4).map(tuple)
known = st.lists(
    st.tuples(st.text(max_size=3), st.text(max_size=3), st.tuples(flags, flags)), max_size=6
)


def profile(*facts: Any) -> Profile:
    made = Profile()
    for each in facts:
        made.add(*each)
    return made


def framed(content: object, kind: str = "shapes", schema: int = SCHEMA) -> Frame:
    sections = {"profile": msgpack.packb(content)}
    return frame.decode(frame.encode(kind=kind, key="abc", schema=schema, sections=sections))


@given(facts=known)
def test_a_profile_is_unchanged_after_a_round_trip_in_any_order(facts: list[Any]) -> None:
    """Once changed, a size stays dynamic. A known fact changes neither profile nor variant."""
    made, again, read = profile(*facts), profile(*reversed(facts)), Profile()
    entries = [frame.decode(each.encode("abc")) for each in (made, again)]
    assert entries[0].header.variant == entries[1].header.variant
    read.update(entries[0])
    assert read.inputs == made.inputs == again.inputs
    assert not any(made.add(*each) for each in facts)


def test_a_union_has_all_facts_of_two_profiles() -> None:
    first = profile(("f", "x", ((True, False), None)))
    first.update(frame.decode(profile(("f", "x", ((False, True), None))).encode("abc")))
    first.update(frame.decode(profile(("g", "y", (None, (True,)))).encode("abc")))
    assert first.inputs == {("f", "x"): ((True, True), None), ("g", "y"): (None, (True,))}


@pytest.mark.parametrize(
    "plain",
    [
        *(1, [1], ["four"], [["f", "x", None]], [["f", "x", True, None]]),
        [["f", "x", [1], None]],
        [["f", "x", ["yes"], None]],
    ],
)
def test_other_data_is_refused(plain: Any) -> None:
    with pytest.raises(CorruptError):
        Profile().update(framed(plain))


@pytest.mark.parametrize(("kind", "schema"), [("aot", SCHEMA), ("shapes", SCHEMA - 1)])
def test_another_kind_or_schema_is_refused(kind: str, schema: int) -> None:
    with pytest.raises(CorruptError):
        Profile().update(framed({}, kind, schema))
