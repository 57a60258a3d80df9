"""The changes that a snapshot reports, compared with copies of the containers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from s3cache.torch_api import internals
from s3cache.util.snapshot import Functions, Snapshot, are_identical
from tests.support.marks import examples


class Liar:
    """An object that claims to equal everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


VALUES = [1, True, 1.0, None, *(Liar() for _ in range(3))]
# A container, a name in it, and the number of a value to put there, or None to remove the name.
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.none() | st.integers(0, len(VALUES) - 1))
)


def _do(steps: list[tuple[int, int, int | None]], containers: list[dict[int, object]]) -> None:
    for container, name, value in steps:
        if value is None:
            containers[container].pop(name, None)
        else:
            containers[container][name] = VALUES[value]


@settings(max_examples=examples(0.5))
@given(first=STEPS, looks=st.lists(STEPS, max_size=4))
def test_containers_that_changed_since_the_last_check_are_reported(
    first: list[tuple[int, int, int | None]], looks: list[list[tuple[int, int, int | None]]]
) -> None:
    """Values are compared by identity: an equal number or object counts as a change."""
    containers: list[dict[int, object]] = [{} for _ in range(4)]
    _do(first, containers)
    snapshot: Snapshot[int] = Snapshot(internals.dict_version.get)
    for number, container in enumerate(containers):
        snapshot.add(number, container)
    for steps in looks:
        before = [dict(container) for container in containers]
        _do(steps, containers)
        differ = {
            number
            for number, (old, new) in enumerate(zip(before, containers, strict=True))
            if not are_identical([*old, *old.values()], [*new, *new.values()])
        }
        assert set(snapshot.changed()) >= differ
    assert snapshot.changed() == []


def test_attributes_of_classes_and_objects_and_items_of_lists_are_watched() -> None:
    """They are watched even if Python has specialized the code that writes them, as in a loop."""

    class Kind:
        number = 0

    one, items = Kind(), [0]
    snapshot: Snapshot[str] = Snapshot(internals.dict_version.get)
    snapshot.add("class", vars(Kind))
    snapshot.add("object", vars(one))
    snapshot.add("list", items)
    for number in range(1, 1000):
        Kind.number = number
        assert snapshot.changed() == ["class"]
        one.number = number
        assert snapshot.changed() == ["object"]
        items[0] = number
        assert snapshot.changed() == ["list"]
    assert snapshot.changed() == []


def test_other_defaults_of_a_function_are_reported_until_they_are_put_back() -> None:
    """Also if a dictionary of defaults is written to in place. An equal value is another value."""

    def function(first: object = 1, *, second: object = 1) -> None: ...

    functions = Functions()
    functions.add([function])
    assert functions.changed() == []
    keywords = function.__kwdefaults__ or {}
    keywords["second"] = True
    assert functions.changed() == [function]
    keywords["second"] = 1
    assert functions.changed() == []
    for name, other in (("__kwdefaults__", {"second": 1.0}), ("__defaults__", (True,))):
        before = getattr(function, name)
        setattr(function, name, other)
        assert functions.changed() == [function]
        setattr(function, name, None)
        assert functions.changed() == [function]
        setattr(function, name, before)
        assert functions.changed() == []
