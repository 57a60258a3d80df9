"""The second level: graphs that cannot be cached as a whole are not compiled again either."""

from __future__ import annotations

import pytest

from s3cache import frame
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

# The number of FX graphs that each way compiles.
WAYS = {"forward": 1, "unknown": 1, "unknown forward": 1, "unknown sizes": 1}


@slow
def test_a_second_level_hit_compiles_nothing_on_another_machine(site: Site) -> None:
    """A forward with a backward that never runs, and graphs that are bypassed.

    Whole graphs need only their own entry: a hit requests nothing else.
    """
    graphs_only = {"S3CACHE_RECALL": "off"}  # requests are counted
    whole = site.machine("whole", **graphs_only).run("fx_programs:train", site.url)
    assert whole["right"]
    assert whole["lowered"] == 3
    counts = {"hits": 0, "misses": 3, "saved": 3, "contained": 3, "bypassed": 0}
    assert whole["second"] == counts
    assert _kinds(site) == ["aot", "aot", "fx", "fx", "fx"]  # other graphs may share them

    machine = site.machine("writer", **graphs_only)
    writer = machine.run("fx_programs:at_both_levels", site.url, list(WAYS))
    trained, ways = writer["trained"], writer["ways"]["ways"]
    assert trained["lowered"] == 0
    assert trained["hits"]["remote"] == 2
    assert trained["second"] == dict.fromkeys(counts, 0)
    assert trained["requests"] == {"get": 2}
    assert all(way["right"] for way in ways.values())
    assert {name: way["lowered"] for name, way in ways.items()} == WAYS
    assert {name: way["saved"] for name, way in ways.items()} == WAYS
    assert _kinds(site) == ["aot", "aot", *["fx"] * (3 + sum(WAYS.values()))]

    reader = site.machine("reader", PATH="").run("fx_programs:each_way", site.url, list(WAYS))
    assert all(way["right"] for way in reader["ways"].values())
    assert {name: way["hits"] for name, way in reader["ways"].items()} == WAYS
    assert {name: way["lowered"] for name, way in reader["ways"].items()} == dict.fromkeys(WAYS, 0)
    assert reader["started"] == []
    # Counted like hits of torch's own cache of FX graphs.
    assert reader["inductor"]["fxgraph_cache_hit"] == sum(WAYS.values())
    assert reader["time_saved_s"] > 0
    # The counts of whole graphs do not include them.
    assert reader["hits"] == {"local": 0, "remote": 0}
    assert reader["bypass_reasons"]["function"] == 3


def test_a_whole_graph_leaves_the_fx_entries_that_it_shares_with_other_graphs(site: Site) -> None:
    """The forward of one graph is saved alone; another graph hits it and is saved as a whole."""
    shared = site.machine("one").run("fx_programs:share_a_forward", site.url)
    assert (shared["lowered"], shared["second"]["hits"]) == (2, 1)
    assert shared["lowered again"] == 0


def _kinds(site: Site) -> list[str]:
    return sorted(frame.decode(path.read_bytes()).header.kind for path in site.entries(halves=True))


@slow
def test_bad_fx_entries_are_misses_and_are_replaced(site: Site) -> None:
    """Missing kernels, invalid pickles, guards and code that fail."""
    ran = site.machine("one").run("graphs:damaged_and_replaced", site.url, "f")
    writer, reader, third = (ran[name] for name in ("writer", "reader", "third"))
    assert writer["wrong"] == reader["wrong"] == third["wrong"] == []
    assert writer["fx"] == {"hits": 0, "misses": {"absent": 5}, "saved": 5}
    assert reader["fx"] == {"hits": 0, "misses": {"corrupt": 5}, "saved": 5}
    assert ran["replaced"]
    assert third["fx"] == {"hits": 5, "misses": {}, "saved": 0}


@slow
def test_a_patch_that_only_observes_torch_costs_no_hits_and_is_named_once(site: Site) -> None:
    """Keys contain its source, and not its counts."""
    ran = site.machine("one").run("fx_programs:observed", site.url)
    assert [(each["right"], each["lowered"]) for each in ran["machines"]] == [(True, 2), (True, 0)]
    warnings = [line for line in ran["stderr"].splitlines() if "FakeTensorMode" in line]
    assert len(warnings) == len(ran["machines"])
    assert "tests.hooks.fx_programs.Counter" in ran["stderr"]
    assert "put torch's own back" in ran["stderr"]
    assert all("override" in warning for warning in warnings)
