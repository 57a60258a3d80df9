"""Installing s3cache and setting ``S3CACHE_URL`` is enough: torch enables it, once it compiles.

``make test`` runs a process without the variable, and a program with it; ``make test-all`` adds
choices of the program, mistakes, and operators that are registered early.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from s3cache.seam import kinds
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


# -- cost

_COST = """\
import json, sys
before = set(sys.modules)
import _s3cache_autoload
_s3cache_autoload.autoload()
alone = sorted(set(sys.modules) - before)
import torch

named = [name for name in sys.modules if "s3cache" in name]
print(json.dumps({"modules": named, "alone": alone}))
"""


@pytest.mark.parametrize(
    "variables",
    [{}, pytest.param({"S3CACHE_URL": "memory://x", "S3CACHE_AUTOLOAD": "0"}, marks=slow)],
)
def test_without_a_url_importing_torch_costs_two_small_files(
    site: Site, variables: dict[str, str]
) -> None:
    """``import torch`` imports two small files, and nothing of s3cache."""
    seen = site.machine("one").account(_COST, **variables)
    files = ["_s3cache_autoload", "_s3cache_process"]
    assert sorted(seen["modules"]) == files
    assert seen["alone"] == [*files, "atexit"]  # atexit is part of the interpreter


# -- programs that do not mention s3cache

_SILENT = """\
import json, sys
import torch

light = "s3cache.hooks" not in sys.modules
x = torch.arange(9.0).reshape(3, 3)
assert torch.equal(torch.compile(lambda x: x @ x)(x), x @ x)
from torch._dynamo.utils import counters
print(json.dumps({"light": light, **counters["aot_autograd"]}))
"""


def test_a_program_shares_its_compiles(site: Site) -> None:
    seen = site.machine("one").account(_SILENT, S3CACHE_URL=site.url)
    assert seen["light"]
    assert seen["autograd_cache_saved"] == 1
    # A CUDA build of torch warns if there is no GPU.
    lines = [each for each in seen["stderr"].splitlines() if "No CUDA runtime" not in each]
    assert lines == []
    assert len(site.entries()) == 1  # uploaded, although the program did not wait for it


@slow
def test_without_a_url_the_switch_enables_the_local_tier(site: Site) -> None:
    machine = site.machine("one", S3CACHE_AUTOLOAD="1")
    assert machine.account(_SILENT)["autograd_cache_saved"] == 1
    elsewhere = {"TORCHINDUCTOR_CACHE_DIR": str(machine.root / "another")}
    assert machine.account(_SILENT, **elsewhere)["autograd_cache_hit"] == 1


# -- choices of the program or the environment win

_CHOICES = """\
import json, os, sys
before, after = {choice!r}
exec(before)
import torch
import torch._dynamo
exec(after)
import torch._inductor.compile_fx
import s3cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
cache = s3cache.active()
print(json.dumps({{
    "url": None if cache is None else cache.settings.url,
    "mode": None if cache is None else cache.settings.mode,
    "in_torch": "s3cache" in AOTAutogradCache.try_load.__module__,
    "awaited": sorted(each._name for each in sys.meta_path if "s3cache.util" in repr(each)),
}}))
"""
_OTHER = "import s3cache; s3cache.enable('memory://other')"
_ASKED = "import s3cache; assert s3cache.active().settings.url == os.environ['S3CACHE_URL']"
# While the cache is on, it waits for the import of other installed compilers, and of DDP.
_DDP = "torch._dynamo.backends.distributed"
_MODULES = ("helion", _DDP, "triton.runtime.cache") if kinds() else ()
_AWAITED = [each for each in _MODULES if find_spec(each.split(".")[0])]
_ON = {"mode": "read-write", "in_torch": True, "awaited": _AWAITED}
_NOT: dict[str, Any] = {"url": None, "mode": None, "in_torch": False, "awaited": []}


@slow
@pytest.mark.parametrize(
    ("before", "after", "variables", "expected"),
    [
        (_ASKED, "", {}, {"url": "memory://one", **_ON}),
        pytest.param(_OTHER, "", {}, {"url": "memory://other", **_ON}, marks=nightly),
        pytest.param("", _OTHER, {}, {"url": "memory://other", **_ON}, marks=nightly),
        ("", f"{_ASKED}; s3cache.disable()", {}, _NOT),
        pytest.param("", "", {"S3CACHE_AUTOLOAD": "no"}, _NOT, marks=nightly),
        pytest.param(
            *("", "", {"S3CACHE_MODE": "off"}, {"url": "memory://one", **_ON, "mode": "off"}),
            marks=nightly,
        ),
    ],
)
def test_each_choice_of_the_program_and_the_environment_wins(
    site: Site, before: str, after: str, variables: dict[str, str], expected: dict[str, Any]
) -> None:
    """Before ``import torch`` or after it; :func:`s3cache.active` enables the waiting cache."""
    program = _CHOICES.format(choice=(before, after))
    variables = {"S3CACHE_URL": "memory://one", **variables}
    assert site.machine("one").account(program, **variables) == {**expected, "stderr": ""}


# -- mistakes

_MISTAKEN = """\
import json
import torch

x = torch.arange(9.0).reshape(3, 3)
failed = []
for backend in ("inductor", "s3cache", "s3cache"):
    torch._dynamo.reset()
    try:
        assert torch.equal(torch.compile(lambda x: x @ x, backend=backend)(x), x @ x)
    except Exception as exc:
        failed.append(str(exc))
print(json.dumps({"failed": failed}))
"""


@slow
def test_a_mistake_is_one_warning(site: Site) -> None:
    """Also if a backend asks for the same cache; and everything compiles."""
    seen = site.machine("one", S3CACHE_URL="ftp://x").account(_MISTAKEN)
    assert seen["failed"] == []
    assert seen["stderr"].count("s3cache: not enabled") == 1
    assert seen["stderr"].count("scheme 'ftp': is not known") == 1
    assert "Traceback" not in seen["stderr"]


@slow
def test_strict_mode_raises_at_the_first_compile(site: Site) -> None:
    """``import torch`` does not raise it, as torch would turn it into another error."""
    machine = site.machine("one", S3CACHE_URL="ftp://x", S3CACHE_STRICT="1")
    seen = machine.account(_MISTAKEN)
    assert "scheme 'ftp': is not known" in seen["failed"][0]
    assert seen["stderr"] == ""


# -- operators that are registered between torch's import and the first compile

_REGISTERING = """\
import json, os, sys
if len(sys.argv) > 1:
    import s3cache
    s3cache.enable()
import torch

library = torch.library.Library("s3cache_early", "DEF")
library.define("mine(Tensor x) -> Tensor")
library.impl("mine", lambda x: x * 2, "CPU")
library.impl("mine", lambda x: torch.empty_like(x), "Meta")
# As torchao does: this module imports the compiler, so its own import has not ended then.
import torch._inductor.lowering
x = torch.arange(9.0)
assert torch.equal(torch.compile(lambda x: torch.ops.s3cache_early.mine(x) + 1)(x), x * 2 + 1)
from s3cache import active
stats = active().stats()
hits = sum(stats.fx.hits.values())
print(json.dumps({"hits": hits, "saved": stats.fx.saved, "bypassed": stats.bypassed}))
"""


@slow
def test_operators_registered_before_the_first_compile_are_seen(site: Site) -> None:
    """Two programs share their compiles, although only one enables the cache before torch.

    The operator's fake implementation takes part in tracing, so they share at the second level.
    """
    for name, words, hits in (("one", ["enable"], 0), ("two", [], 1)):
        seen = site.machine(name).account(_REGISTERING, *words, S3CACHE_URL=site.url)
        assert (seen["hits"], seen["saved"], seen["bypassed"]) == (hits, 1 - hits, 1)
