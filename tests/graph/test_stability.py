"""Keys are the same in every process, and on every machine of the same kind."""

from __future__ import annotations

import shutil
import site
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.graph import programs
from tests.graph.checking import key_of
from tests.support.machines import ROOT, Machine
from tests.support.marks import nightly, slow

pytestmark = pytest.mark.timeout(900)


def another_prefix(root: Path) -> Path:
    """Make another import path: links to installed packages, and copies of our tests."""
    (packages,) = [each for each in site.getsitepackages() if (Path(each) / "torch").is_dir()]
    root.mkdir(parents=True)
    for each in Path(packages).iterdir():
        (root / each.name).symlink_to(each)
    (root / "s3cache").symlink_to(ROOT / "s3cache")
    ours = ["__init__.py", "graph/__init__.py", "graph/checking.py", "graph/programs.py"]
    ours += [f"support/{name}.py" for name in ("__init__", "forking", "machines")]
    for name in ours:
        (root / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, root / "tests" / name)
    return root


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the reports of two machines that have only their kind in common."""
    root = tmp_path_factory.mktemp("machines")
    prefix = another_prefix(root / "opt" / "venv" / "lib")
    machines = [
        Machine(root / "first"),
        Machine(
            root / "second" / "of two",
            PYTHONHASHSEED="2",
            PYTHONPATH=str(prefix),
            USER="somebody-else",
            HOSTNAME="elsewhere",
            VIRTUAL_ENV=str(root / "opt" / "venv"),
        ),
    ]
    return [
        each.run("tests.graph.programs:report", server=0 if each is machines[0] else None).result
        for each in machines
    ]


def test_keys_do_not_depend_on_process_path_user_or_hash_seed(found: list[dict[str, Any]]) -> None:
    first, second = found
    for name in ("torch", "here", "seed", "user", "home", "argv", "hash"):
        assert first[name] != second[name], f"both machines have the same {name}"
    assert first["components"] == second["components"]


@nightly
@pytest.mark.parametrize("seed", "34")
def test_keys_do_not_depend_on_the_hash_seed(
    found: list[dict[str, Any]], tmp_path: Path, seed: str
) -> None:
    machine = Machine(tmp_path, PYTHONHASHSEED=seed)
    assert machine.run("tests.graph.programs:report").result["components"] == found[0]["components"]


def test_each_program_has_its_own_key(found: list[dict[str, Any]]) -> None:
    keys = [str({n: v[0] for n, v in each.items()}) for each in found[0]["components"].values()]
    assert len(set(keys)) == len(programs.programs())


def test_no_component_names_a_path_or_a_user(found: list[dict[str, Any]]) -> None:
    for place in (found[1]["home"], str(Path(found[1]["torch"]).parents[1]), "somebody-else"):
        assert place not in str(found[1]["components"])


@slow
@pytest.mark.filterwarnings("ignore")  # torch instantiates a class that it warns about
def test_keys_are_the_same_at_the_second_check_in_one_process(found: list[dict[str, Any]]) -> None:
    """Earlier checks do not matter, and neither do objects that happen to be shared."""
    again = programs.components()
    assert again == programs.components()
    changing = {"torch.num_threads", "cpp_runtime_thread_count"}  # machines set these
    for name, parts in found[0]["components"].items():
        for part, value in parts.items():
            if part not in changing and not part.endswith("_config"):
                assert again[name][part] == value, f"{name}: {part}"


def key_of_changed(change: Callable[[torch.fx.GraphModule], None]) -> str | None:
    from torch._inductor.compile_fx import compile_fx

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        change(gm)
        return compile_fx(gm, inputs)

    program = torch.compile(lambda x, y: x.sin() + y, backend=backend)
    return key_of(program, torch.ones(3), torch.ones(3))


def rename_placeholders(gm: torch.fx.GraphModule) -> None:
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.target = f"another_{index}"
        node._rename(node.target)
    gm.recompile()


def fill_ignored_fields(gm: torch.fx.GraphModule) -> None:
    gm.meta["noted"] = object()
    vars(gm).update(compile_subgraph_reason="because", _backend_id="random")
    vars(gm).update(_param_name_to_source={"x": "somewhere"})


def change_the_code(gm: torch.fx.GraphModule) -> None:
    list(gm.graph.nodes)[2].target = "cos"
    gm.recompile()


def test_names_of_placeholders_and_ignored_fields_do_not_matter() -> None:
    key = key_of_changed(lambda gm: None)
    assert key_of_changed(rename_placeholders) == key
    assert key_of_changed(fill_ignored_fields) == key
    assert key_of_changed(change_the_code) not in (key, None)
