"""A block that makes many permanent objects is not interrupted by garbage collections."""

from __future__ import annotations

import gc

from s3cache.util.garbage import no_collections


def test_objects_of_the_block_are_old_and_the_threshold_is_restored() -> None:
    threshold, collections = gc.get_threshold(), 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal collections
        collections += phase == "start"

    with no_collections():
        gc.callbacks.append(count)
        made: list[list[int]] = [[] for _ in range(10 * threshold[0])]
        gc.callbacks.remove(count)
    assert collections == 0
    assert gc.get_threshold() == threshold
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert {id(each) for each in made} <= old
