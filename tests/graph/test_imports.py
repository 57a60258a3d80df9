"""Changes to torch's modules between their import and the first compile are in the key."""

from __future__ import annotations

import cmath
import json
import math
from pathlib import Path

import pytest

from s3cache.graph._describe import digest_of
from tests.support.marks import nightly, slow
from tests.support.scripts import run_script

# Each change runs in its own process, which has imported torch but not its compiler.
_CHANGES = {
    "a text": "from torch._inductor.codegen import cpp; cpp.INDEX_TYPE = 'int32_t'",
    "a number in a class": (
        "from torch._inductor.codegen.cpp import CppScheduling as C;C.MAX_FUSED_KERNEL_ARGS_NUM = 3"
    ),
    "a table": "from torch._inductor.codegen import cpp; cpp.VECTORIZABLE_DTYPES.pop()",
    "a set": "from torch._inductor.codegen import cpp; cpp.VECTORIZABLE_RTYPES.add('mine')",
    "a table in a table": (
        "from torch._inductor.codegen import cpp_utils as u; u.DTYPE_TO_CPP[torch.float] = 'mine'"
    ),
    "nothing in a table": (
        "from torch._inductor.codegen import cpp_utils as u; u.DTYPE_TO_CPP[torch.half] = None"
    ),
    "a default": (
        "from torch._inductor.codegen import cpp_utils;"
        "cpp_utils.codegen_rand.__defaults__ = (torch.float64,)"
    ),
    "two functions": (
        "from torch._inductor.codegen.cpp import CppOverrides as C; C.sin, C.cos = C.cos, C.sin"
    ),
    "what comes with torch": (
        "from torch._subclasses import fake_tensor; fake_tensor.CONSTANT_NUMEL_LIMIT = 7"
    ),
}
# These leave the key as it is.
_IMPORTS = "import torch._inductor.codegen.cpp, torch._inductor.lowering, torch._dynamo"
_COUNTER = "import torch._inductor.debug as d; d._pre_grad_graph_id = 7"
_NO_ENTRY_POINT = "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'"

_PROGRAM = """
import json, os, sys
{first}
import torch

ENABLE = "import s3cache; s3cache.enable(local_dir={tier!r})"

def key(change, early):
    read, write = os.pipe()
    if not os.fork():
        for line in (ENABLE, change) if early else (change, ENABLE):
            exec(line)
        import s3cache
        (graph,) = s3cache.check(lambda x: x.sin() + 1, torch.ones(4, 4)).graphs
        os.write(write, json.dumps(graph.key).encode())
        os._exit(0)
    os.close(write)
    return json.load(open(read))

print(json.dumps([key(change, early) for change, early in json.loads(sys.argv[1])]))
"""


def _keys(tmp_path: Path, changes: list[str], *, early: bool, first: str = "") -> list[str | None]:
    """Return the key after each change, or None; ``early`` enables the cache before it."""
    program = _PROGRAM.format(first=first, tier=str(tmp_path / "tier"))
    cases = json.dumps([(change, early) for change in changes])
    found: list[str | None] = json.loads(run_script(program, cases).stdout)
    return found


def _check(tmp_path: Path, names: list[str], same: list[str], *, early: bool) -> None:
    """Check the keys after changes with these names, and after code that changes nothing."""
    changes = ["", *same, *(_CHANGES[name] for name in names)]
    plain, *others = _keys(tmp_path, changes, early=early)
    assert plain is not None
    assert others[: len(same)] == [plain] * len(same)
    changed = others[len(same) :]
    keys = {name for name, key in zip(names, changed, strict=True) if key is not None}
    assert {*names} - keys <= {"a default", "what comes with torch"}  # they may have no key
    assert len({plain, *filter(None, changed)}) == 1 + len(keys)


def test_a_change_before_the_compiler_is_imported_is_in_the_key(tmp_path: Path) -> None:
    _check(tmp_path, ["a table"], [], early=True)


@slow
def test_imports_do_not_change_the_key_and_changes_before_s3cache_do(tmp_path: Path) -> None:
    _check(tmp_path, ["a text", "nothing in a table"], [_IMPORTS], early=False)


@nightly
@pytest.mark.parametrize("early", [True, False])
def test_each_change_before_the_compiler_is_imported_is_in_the_key(
    tmp_path: Path, early: bool
) -> None:
    """Documented: functions are recorded only if a cache is named."""
    names = [name for name in _CHANGES if early or name != "a default"]
    _check(tmp_path, names, [_IMPORTS], early=early)


@nightly
def test_changes_are_in_the_key_if_s3cache_saw_no_imports(tmp_path: Path) -> None:
    """Without torch's entry point, torch's modules can be imported before s3cache.

    An internal counter of torch is in no key: with it, no two processes would share.
    """
    compiler = "import torch._inductor.compile_fx;"
    changes = [compiler + each for each in ("", "", _COUNTER, *_CHANGES.values())]
    same, again, counted, *found = _keys(tmp_path, changes, early=False, first=_NO_ENTRY_POINT)
    assert same == again == counted is not None
    assert len({same, *found}) == 1 + len(_CHANGES)


def test_native_functions_with_one_name_in_two_modules_differ() -> None:
    assert digest_of({"f": math.cos}) != digest_of({"f": cmath.cos})
