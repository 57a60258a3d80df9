"""The properties of a machine with a GPU that a key depends on: the table of docs/keys.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import keys
from tests.support.gpu import standin
from tests.support.machines import ROOT
from tests.support.marks import cases, selected

#: Properties that reach the key in the same way as others.
SIMILAR = {
    *("compute capability", "shared memory", "registers", "threads", "cache"),
    *("identity", "processor", "user"),
}
pytestmark = pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    machine = standin.machine(tmp_path_factory.mktemp("keys"))
    return machine.run("tests.gpu.keys:keys", [*selected(request, "what")]).result


@pytest.mark.parametrize("what", cases(keys.IN_KEY, slow_ones=SIMILAR))
def test_a_change_of_a_property_in_the_key_changes_the_key(found: Any, what: str) -> None:
    assert found[what][0] != found["nothing"][0]


@pytest.mark.parametrize("what", cases(keys.NOT_IN_KEY, slow_ones=SIMILAR))
def test_a_change_of_another_property_keeps_the_key(found: Any, what: str) -> None:
    assert found[what] == found["nothing"]


def test_the_processor_is_not_a_component_of_the_key(found: Any) -> None:
    components = found["nothing"][1]
    assert "machine.accelerator" in components
    assert not {"machine.isa", "torch.cpu_capability", "torch.num_threads"} & set(components)


def test_the_documentation_lists_each_property() -> None:
    text = Path(ROOT, "docs/keys.md").read_text(encoding="utf-8")
    table = text.partition("\n## GPUs\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| (yes|no) \|", table, re.MULTILINE)
    expected = [(what, "yes") for what in keys.IN_KEY] + [(what, "no") for what in keys.NOT_IN_KEY]
    assert rows == expected
