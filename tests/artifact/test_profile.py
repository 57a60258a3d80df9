"""A profile of what changes is data: it comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3cache import frame
from s3cache.artifact import Changing, ShapeProfile
from s3cache.errors import CorruptError

flags = st.none() | st.lists(st.booleans(), max_size=4).map(tuple)
begun = st.sets(st.text(max_size=3), max_size=5).map(sorted).map(tuple)
changing = st.builds(Changing, flags, flags, begun)
profiles = st.builds(
    ShapeProfile,
    st.dictionaries(st.text(max_size=3), st.dictionaries(st.text(max_size=3), changing)),
)


@given(profile=profiles)
def test_a_profile_comes_back_as_it_was(profile: ShapeProfile) -> None:
    assert ShapeProfile.of(frame.decode(profile.encode("abc"))) == profile


@given(profile=profiles)
def test_profiles_that_say_the_same_are_one_variant(profile: ShapeProfile) -> None:
    reversed_one = ShapeProfile(
        {code: dict(reversed(inputs.items())) for code, inputs in reversed(profile.inputs.items())}
    )
    variants = [frame.decode(each.encode("abc")).header.variant for each in (profile, reversed_one)]
    assert variants[0] == variants[1]


@given(changes=st.lists(changing, min_size=1, max_size=4))
def test_what_changed_once_stays_changing(changes: list[Changing]) -> None:
    """Whatever the order in which it is learned; and what is known already is no news."""
    forth, back = ShapeProfile(), ShapeProfile()
    for one in changes:
        forth.add("code", "x", one)
    for one in reversed(changes):
        back.add("code", "x", one)
    assert forth == back
    assert not any(forth.add("code", "x", one) for one in changes)


def test_all_that_two_profiles_know_is_in_their_union() -> None:
    profile = ShapeProfile({"f": {"x": Changing(sizes=(True, False))}})
    profile.update(ShapeProfile({"f": {"x": Changing(sizes=(False, True))}, "g": {}}))
    profile.update(ShapeProfile({"g": {"y": Changing(strides=(True,))}}))
    assert profile.get("f", "x") == Changing(sizes=(True, True))
    assert profile.get("g", "y") == Changing(strides=(True,))
    assert profile.get("g", "x") is None


@pytest.mark.parametrize(
    "plain",
    [
        1,
        [],
        {1: {}},
        {"f": []},
        {"f": {"x": 1}},
        {"f": {"x": [None]}},
        {"f": {"x": [None, None]}},
        {"f": {"x": [True, None, None, []]}},
        {"f": {"x": [[1], None, []]}},
        {"f": {"x": ["yes", None, []]}},
        {"f": {"x": [None, None, [1]]}},
        {"f": {"x": [None, None, None]}},
    ],
)
def test_other_data_is_refused(plain: Any) -> None:
    content = {"profile": msgpack.packb(plain)}
    with pytest.raises(CorruptError):
        ShapeProfile.of(
            frame.decode(frame.encode(kind="shapes", key="abc", schema=2, sections=content))
        )


@pytest.mark.parametrize(("kind", "schema"), [("aot", 2), ("shapes", 1)])
def test_another_kind_or_schema_is_refused(kind: str, schema: int) -> None:
    content = {"profile": msgpack.packb({})}
    with pytest.raises(CorruptError):
        ShapeProfile.of(
            frame.decode(frame.encode(kind=kind, key="abc", schema=schema, sections=content))
        )
