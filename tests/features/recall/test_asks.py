"""The table of Dynamo's questions has every function that asks something, as somebody has read it.

``infra/asks.py`` finds the functions in the source of torch. A function that a release adds or
changes fails here by its name. Read it, correct its row, and run ``python -m infra.asks`` for the
release.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from infra import asks
from tests.features.recall.programs import all_programs
from tests.support.marks import slow

RELEASE = version("torch").partition("+")[0]
ROWS = {row.name: row for row in asks.table()}
_ASKING = '''
class ListVariable:
    def call_obj_hasattr(self, tx, name):
        """Ask the list."""
        def inner(): return {inner}
        return VariableTracker.build(tx, hasattr(self.value, name))
    def size(self): return len(self.items)
'''


@slow
@pytest.mark.skipif(RELEASE not in asks.RELEASES, reason=f"torch {RELEASE} has no digests")
def test_each_function_that_asks_something_is_in_the_table_as_it_was_read() -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    found = asks.find(Path(spec.submodule_search_locations[0]))
    assert len(found) > 500, "torch's sources are elsewhere"
    known = {name: row.digests.get(RELEASE) for name, row in ROWS.items()}
    assert [name for name in found if known.get(name) is None] == [], "not in the table"
    assert [name for name, each in found.items() if each.digest != known[name]] == [], "changed"
    assert [name for name in known if known[name] and name not in found] == [], "not in torch"


def test_each_row_says_how_recall_has_the_answer() -> None:
    assert [row.name for row in ROWS.values() if row.how not in asks.KINDS] == []
    programs = {each.name.partition("/")[2] for each in all_programs()}
    named = {name for row in ROWS.values() for name in row.examples}
    assert named - programs == set()


@pytest.mark.parametrize(
    ("change", "is_new"),
    [
        ("no change", False),
        ("return {inner}", False),  # a function inside has its own row
        ("Ask the list.", False),
        ("hasattr(self.value, name)", True),
    ],
)
def test_a_digest_is_of_the_code_of_one_function(change: str, is_new: bool, tmp_path: Path) -> None:
    digests = []
    for text in (_ASKING, _ASKING.replace(change, f"{change} and 1")):
        variables = tmp_path / "_dynamo" / "variables"
        variables.mkdir(parents=True, exist_ok=True)
        variables.joinpath("lists.py").write_text(text, encoding="utf-8")
        found = asks.find(tmp_path)
        assert [*found] == ["variables.lists:ListVariable.call_obj_hasattr"]
        digests.append(found["variables.lists:ListVariable.call_obj_hasattr"].digest)
    assert (digests[0] != digests[1]) == is_new
    assert re.fullmatch("[0-9a-f]{12}", digests[0])
