"""Some modules and templates of torch's compiler are loaded only at their first use."""

from __future__ import annotations

import pytest

from tests.support.marks import nightly
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

_PROGRAM = """\
import json, os, sys
import s3cache
when, url = sys.argv[1:]
if when == "late":
    import torch._inductor.compile_fx
if when != "never":
    s3cache.enable(url, strict=True)
import torch
from torch._inductor import config

def model(x, y):
    return torch.nn.functional.gelu(x @ y).sum()

def train(times):
    torch.manual_seed(0)
    x, y = (torch.randn(32, 32, requires_grad=True) for _ in "xy")
    compiled = torch.compile(lambda x, y: model(x * times, y))
    compiled(x, y).backward()
    return float(x.grad.double().sum())

found = {"gradients": [train(1)]}
from jinja2 import Template
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.kernel.mm import mm_template
from torch._functorch._activation_checkpointing import graph_info_provider

template = mm_template.template
found["light"] = not {"networkx", "redis"} & sys.modules.keys() and type(template) is not Template
import torch._inductor.compile_fx
# The first uses.
found["rendered"] = [template.name, sorted(template.blocks), isinstance(template, Template)]
found["like one"] = vars(template).keys() == vars(KernelTemplate._template_from_string("")).keys()
found["error"] = None
try:
    KernelTemplate._template_from_string("{{")
except Exception as exc:
    found["error"] = [type(exc).__name__, str(exc).count("-->")]
nodes = graph_info_provider.nx.DiGraph([(1, 2)])
import networkx
found["nodes"] = isinstance(nodes, networkx.DiGraph)
# A program's own use, before and after.
found["gradients"].append(train(2))
import torch._functorch.config
with torch._functorch.config.patch(activation_memory_budget=0.5):
    torch._dynamo.reset()
    found["gradients"].append(train(3))
if when != "never":
    stats = s3cache.active().stats()
    found["hits"], found["misses"] = sum(stats.hits.values()), sum(stats.misses.values())
    s3cache.disable()
print(json.dumps(found))
"""


@nightly
def test_a_hit_delays_imports_and_templates_until_their_first_use(site: Site) -> None:
    """No key depends on the delay: a process that imports everything hits another one's entries.

    Programs find the same modules, templates and errors as with torch alone.
    """
    writer, late, reader, alone = (
        site.machine(f"{number}").account(_PROGRAM, when, site.url)
        for number, when in enumerate(("early", "late", "early", "never"))
    )
    assert reader["light"]  # a miss needs some of them
    assert not late["light"]
    assert not alone["light"]
    assert writer["gradients"] == late["gradients"] == reader["gradients"] == alone["gradients"]
    for name in ("rendered", "like one", "error", "nodes"):
        assert writer[name] == late[name] == reader[name] == alone[name], name
    assert alone["rendered"][2]
    assert alone["like one"]
    assert alone["nodes"]
    assert writer["misses"] == 3
    for each in (late, reader):
        assert (each["hits"], each["misses"]) == (3, 0)
