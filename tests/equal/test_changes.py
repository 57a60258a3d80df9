"""Never a wrong hit: a program with one change misses, or does what a cold compile does.

``make test-perturb`` judges all changes, ``make test-nightly`` some hundred of them, and
``make test`` some twenty: always the same ones, and some of each family.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.machines import Machine
from tests.support.marks import nightly, slow

pytestmark = pytest.mark.timeout(900)


def _some_of_each(count: int) -> dict[str, Any]:
    """Judge ``count`` changes of each family, and of each kind of pairs with several calls."""
    from tests.equal.changes import all_pairs
    from tests.equal.changes.bases import BASES
    from tests.equal.judge import judge

    # A base must be compiled before it can hit, which takes most of the time.
    quick = ("pointwise", "inplace", "dynamic")
    pairs = [each for each in all_pairs() if each.filled in quick or each.filled not in BASES]
    chosen = []
    for family in sorted({each.family for each in pairs}):
        members = [each for each in pairs if each.family == family]
        # Programs of several calls are compiled three times each.
        number = count if members[0].by_key else count // 6
        assert members[0].by_key or len(members) >= 40, f"{family} has {len(members)} members"
        chosen += random.Random(family).sample(members, min(number, len(members)))
    return {**judge(chosen).as_dict(), "chosen": len(chosen)}


@pytest.fixture(scope="module", params=[2, pytest.param(12, marks=nightly)])
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    # Takes minutes with --all, beside other tests; the limit of this module stops it if it hangs.
    job = f"{__name__}:_some_of_each"
    return machine.run(job, request.param, timeout_s=850, server=0).result


def test_no_change_gets_a_wrong_answer(verdicts: Any) -> None:
    assert verdicts["wrong"] == []


def test_no_base_loses_its_key(verdicts: Any) -> None:
    assert verdicts["lost"] == []


def test_enough_changes_could_be_judged(verdicts: Any) -> None:
    """torch itself rejects some changes, such as a transposed tensor in place of a flat one."""
    assert verdicts["judged"] >= verdicts["chosen"] * 0.9, verdicts["broken"]


def test_most_changes_are_misses_and_some_are_right_hits(verdicts: Any) -> None:
    """If everything missed, keys would include things that do not matter."""
    misses = sum(family.get("miss", 0) for family in verdicts["counts"].values())
    assert misses > verdicts["judged"] / 2
    assert verdicts["right"]


# -- knowledge of sizes


def _sizes(count: int) -> dict[str, Any]:
    """Judge that many pairs for each kind of entry, or a few."""
    from tests.equal.changes.sizes import A_FEW, pairs
    from tests.equal.judge import judge

    return judge(pairs(count) if count else A_FEW).as_dict()


@pytest.mark.needs("recall")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "count", [pytest.param(0, marks=slow), *(pytest.param(n, marks=nightly) for n in (10, 240))]
)
def test_a_hit_never_narrows_a_program(count: int, tmp_path: Path) -> None:
    """Results, errors and compiles are as without the cache, and guards accept the same sizes."""
    found = Machine(tmp_path).run(f"{__name__}:_sizes", count, timeout_s=3500, server=0).result
    assert found["wrong"] == []
    assert not count or found["judged"] == 3 * count
    assert found["totals"]["pairs with a recompile"]
    if count > 100:  # a sample may lack one of these
        assert found["totals"]["pairs with an error"]
        assert found["counts"]["sizes recall"]["right"] >= 60


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
    found = Machine(tmp_path).run(f"{__name__}:_with_torchs_own_key", server=0).result
    assert any("half" in each for each in found["wrong"]), found


def _asked() -> dict[str, Any]:
    """Judge one changed and one unchanged pair for each code, always the same ones."""
    from tests.equal.changes import asking
    from tests.equal.judge import judge

    pairs = [*asking.asked()]
    random.Random(0).shuffle(pairs)
    by_code = {(each.name.partition(" reads ")[0], each.must_hit): each for each in pairs}
    return judge(by_code.values()).as_dict()


@nightly
def test_user_code_never_hits_an_entry_that_was_traced_in_another_state(tmp_path: Path) -> None:
    """User code may read any state of the process. ``make test-perturb`` judges all pairs."""
    found = Machine(tmp_path).run(f"{__name__}:_asked", timeout_s=850, server=0).result
    assert found["wrong"] == []
    assert found["judged"] == 26
    assert found["counts"]["asking"]["miss"] > 6


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
    found = Machine(tmp_path).run(f"{__name__}:_settings_kept", server=0).result
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
    environments = {
        "as it is": {},
        "processor": {"ATEN_CPU_CAPABILITY": "default"},
        "compiler": {"CXX": "another-g++"},
    }
    here, other, compiler = (
        Machine(tmp_path / name, **environment).run(f"{__name__}:_keys_here", server=0).result
        for name, environment in environments.items()
    )
    assert compiler == here
    for program in here:
        assert here[program] != other[program], program
