"""A function of torch that a hook replaces stays what it was, and is put back exactly."""

from __future__ import annotations

from typing import Any

import pytest

import tests.support.compiler  # noqa: F401
from s3cache.hooks._state import Patches
from s3cache.torch_api import internals


@pytest.mark.parametrize(
    ("internal", "kind", "own"),
    [
        (internals.autograd_cache_key, "function", True),
        (internals.wrap_post_compile, "function", True),
        (internals.get_hash, "function", False),
        (internals.try_load, "staticmethod", True),
        (internals.evaluate_guards, "staticmethod", True),
        (internals.load_library, "classmethod", True),
        (internals.iterate_over_candidates, "classmethod", False),
    ],
    ids=lambda each: getattr(each, "place", None),
)
def test_a_replaced_function_stays_what_it_was_and_is_put_back(
    internal: Any, kind: str, own: bool
) -> None:
    """``own``: whether its owner has it itself, and does not inherit it."""
    owner, name = internal.owner()
    before = dict(vars(owner))
    assert (name in before) == own
    given = []

    def make(original: Any) -> Any:
        given.append(original)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return replacement

    patches = Patches()
    patches.replace(internal, make)
    replaced = vars(owner)[name]
    assert type(replaced).__name__ == kind
    assert type(given[0]).__name__ == "function"
    patches.undo()
    assert dict(vars(owner)) == before
