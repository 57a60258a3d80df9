"""What code may read, by the names in its instructions."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache.graph._reads import Chain, reads_of


def chains(source: str, root: str) -> set[str]:
    names: dict[str, Any] = {}
    exec(source, names)
    found = reads_of(names["f"].__code__).chains
    return {".".join((chain.name, *chain.attributes)) for chain in found if chain.root == root}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): return a", {"a"}),
        ("def f(): return a.b.c", {"a.b.c"}),
        ("def f(): return a.b.c(d.e)", {"a.b.c", "d.e"}),
        ("def f(): return [x + g for x in a.b]", {"a.b", "g"}),
        ("def f(): return lambda: a.b", {"a.b"}),
        ("def f(a): return a.b", set()),
    ],
)
def test_globals_with_what_is_read_of_them(source: str, expected: set[str]) -> None:
    assert chains(source, "global") == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n import a\n return a.b", {"a.b"}),
        ("def f():\n import a.c\n return a.c.b", {"a.c.b"}),
        ("def f():\n import a as c\n return c.b", {"a.b"}),
        ("def f():\n import a\n return lambda: a.b", {"a.b"}),
        ("def f():\n import a\n return g(a)", {"a"}),
        ("def f():\n from a import b\n return b.c", {"a.b.c"}),
        ("def f():\n from a import b as c, d\n return c.e + d", {"a.b.e", "a.d"}),
        ("def f():\n import a.c as d\n return d.b", {"a.c"}),  # as a whole: all that is named
    ],
)
def test_imports_with_what_is_read_of_them(source: str, expected: set[str]) -> None:
    assert chains(source, "import") == expected


def test_a_module_that_is_only_bound_is_not_read_as_a_whole() -> None:
    assert chains("def f():\n import a.c\n return a.c.b", "bind") == {"a", "a.c"}


def test_strings_may_be_names() -> None:
    names: dict[str, Any] = {}
    exec("def f(x): return getattr(x, 'a.b'), ('c', ('d',)), 'no name'", names)
    found = reads_of(names["f"].__code__).names
    assert {"a", "b", "c", "d"} <= found
    assert "no name" not in found


def test_relative_imports_tell_how_far_up_they_begin() -> None:
    names: dict[str, Any] = {"__package__": "a.b"}
    exec("def f():\n from ..c import d\n return d", names)
    assert Chain("import", "c", 2, ("d",)) in reads_of(names["f"].__code__).chains
