"""Never a wrong hit: a program with one change misses, or does what a cold compile does.

``make test-perturb``, which ``make test-nightly`` runs, judges all changes. ``make test`` judges
some twenty: always the same ones, of each family that is judged by keys.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.machines import Machine
from tests.support.marks import slow

pytestmark = pytest.mark.timeout(900)


def _run(root: Path, job: str, **environment: str) -> Any:
    return Machine(root, **environment).run(f"{__name__}:{job}", timeout_s=850, server=0).result


def _some_of_each() -> dict[str, Any]:
    """Judge two changes of each family."""
    from tests.equal.changes import changes, users
    from tests.equal.changes.bases import BASES
    from tests.equal.judge import judge

    # A base must be compiled before it can hit, which takes most of the time.
    quick = ("pointwise", "inplace", "dynamic")
    pairs = [*changes.changes(), *users.changes()]
    pairs = [each for each in pairs if each.filled in quick or each.filled not in BASES]
    chosen = []
    for family in sorted({each.family for each in pairs}):
        members = [each for each in pairs if each.family == family]
        chosen += random.Random(family).sample(members, 2)
    return {**judge(chosen).as_dict(), "chosen": len(chosen)}


def test_no_change_gets_a_wrong_answer(tmp_path: Path) -> None:
    """Most changes miss, and some hit: otherwise keys would include things that do not matter.

    No base loses its key. torch itself rejects some changes, such as a transposed tensor in place
    of a flat one.
    """
    verdicts = _run(tmp_path, "_some_of_each")
    assert (verdicts["wrong"], verdicts["lost"]) == ([], [])
    assert verdicts["judged"] >= verdicts["chosen"] * 0.9, verdicts["broken"]
    misses = sum(family.get("miss", 0) for family in verdicts["counts"].values())
    assert misses > verdicts["judged"] / 2
    assert verdicts["right"]


def _sizes() -> dict[str, Any]:
    from tests.equal.changes.sizes import A_FEW
    from tests.equal.judge import judge

    return judge(A_FEW).as_dict()


@pytest.mark.needs("recall")
@slow
def test_a_hit_never_narrows_a_program(tmp_path: Path) -> None:
    """Results, errors and compiles are as without the cache, and guards accept the same sizes."""
    found = _run(tmp_path, "_sizes")
    assert found["wrong"] == []
    assert found["totals"]["pairs with a recompile"]


# Of several kinds: pointwise, indexing, linear algebra, convolution.
OPERATORS = ("add", "index_put", "addmm", "nn_functional_conv2d")


def _operators() -> dict[str, Any]:
    from tests.equal.judge import judge
    from tests.equal.operators import operators  # torch's own tests

    return judge(each for each in operators() if each.name in OPERATORS).as_dict()


@slow
def test_a_second_run_of_an_operator_hits(tmp_path: Path) -> None:
    counts = _run(tmp_path, "_operators")["counts"]
    assert counts == {"samples": {"right": len(OPERATORS)}}


# -- the suite itself, and other states of the process


def _with_torchs_own_key() -> dict[str, Any]:
    """Judge inputs that share a storage without the ``inputs.`` components, as with torch's key."""
    from s3cache.graph import _key
    from tests.equal.changes import changes
    from tests.equal.judge import judge

    components = [row for row in _key.COMPONENTS if not row[0].startswith("inputs.")]
    shared = [pair for pair in changes.changes() if pair.family == "sharing"]
    with patch.object(_key, "COMPONENTS", components):
        return judge(pair for pair in shared if pair.filled == "inplace").as_dict()


@slow
def test_the_suite_can_fail(tmp_path: Path) -> None:
    """With torch's own key, inputs that overlap get the answer for inputs that do not."""
    found = _run(tmp_path, "_with_torchs_own_key")
    assert any("half" in each for each in found["wrong"]), found


def _settings_kept() -> dict[str, list[Any]]:
    """Return two keys of a program under each setting, ``None`` without one."""
    import torch

    from tests.equal.changes.changes import surroundings
    from tests.equal.judge import keys
    from tests.equal.programs import once

    def attends(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        batch = x[None, None]
        attended = torch.nn.functional.scaled_dot_product_attention(batch, batch, batch)
        return torch.nn.functional.linear(x, w) + attended[0, 0]

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4, 4, device="cpu"), torch.ones(4, 4, device="cpu").requires_grad_()

    found: dict[str, list[Any]] = {}
    for name, context in surroundings().items():
        for _ in range(2):
            torch.compiler.reset()
            found.setdefault(name, []).extend(keys(once(attends, make, context=context)))
    return found


@slow
def test_no_setting_of_torch_prevents_caching(tmp_path: Path) -> None:
    """Under each setting of torch, a graph has a key, and the same one each time."""
    found = _run(tmp_path, "_settings_kept")
    assert len(found) > 30
    assert {name: keys for name, keys in found.items() if len(keys) != 2 or len({*keys}) != 1} == {}
    assert [name for name, keys in found.items() if None in keys] == []


def _keys_here() -> dict[str, list[str | None]]:
    """Return the keys of some programs in this process."""
    from tests.equal.changes.bases import BASES
    from tests.equal.judge import keys

    return {name: keys(BASES[name]) for name in ("pointwise", "normed", "mlp")}


@slow
def test_another_environment_has_other_keys(tmp_path: Path) -> None:
    """The compiler is an exception: a hit does not need it."""
    here = _run(tmp_path / "here", "_keys_here")
    assert _run(tmp_path / "compiler", "_keys_here", CXX="another-g++") == here
    other = _run(tmp_path / "processor", "_keys_here", ATEN_CPU_CAPABILITY="default")
    assert [program for program in here if here[program] == other[program]] == []
