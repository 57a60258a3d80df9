"""Every count is in a metric, under a name that its users expect."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from s3cache import Cache, Miss
from s3cache.metrics import FAMILIES, families
from s3cache.stats import Histogram, LevelStats, Usage
from tests.metrics.counts import counted
from tests.support.caching import entry

if TYPE_CHECKING:
    from pathlib import Path


def test_names_follow_the_rules_of_both_ecosystems() -> None:
    """See https://opentelemetry.io/docs/specs/semconv/general/naming/ and Prometheus' own rules."""
    for family in FAMILIES:
        assert re.fullmatch(r"s3cache(\.[a-z]+(_[a-z]+)*)+", family.name), family
        assert family.unit in ("s", "By") or re.fullmatch(r"\{[a-z]+\}", family.unit), family
        assert family.text.endswith("."), family
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.prometheus_name.replace("s3", "s")), family
        assert not family.prometheus_name.endswith("_total"), "the client adds that"
        if family.kind == "histogram":
            assert family.prometheus_name.endswith("_seconds")
    for names in ([f.name for f in FAMILIES], [f.prometheus_name for f in FAMILIES]):
        assert len({*names}) == len(names)


def test_every_count_changes_a_metric() -> None:
    """Counts are taken away one by one, and each changes something."""
    stats = counted()
    before = families(stats)
    unseen = set()
    for field in dataclasses.fields(stats):
        blank: dict[str, Any] = {field.name: _blank(getattr(stats, field.name))}
        less = dataclasses.replace(stats, **blank)
        if families(less) == before:
            unseen.add(field.name)
    for field in dataclasses.fields(stats.fx):
        blank = {field.name: _blank(getattr(stats.fx, field.name))}
        fx = dataclasses.replace(stats.fx, **blank)
        if families(dataclasses.replace(stats, fx=fx)) == before:
            unseen.add(f"fx.{field.name}")
    # What was saved is uploaded, and counted in bytes there; what was superseded was never shared.
    assert unseen == {"saved_bytes", "fx.superseded"}


def _blank(value: object) -> Any:
    if isinstance(value, dict):
        return {}
    if isinstance(value, str):
        return "closed"
    if isinstance(value, (int, float)):
        return 0
    return {LevelStats: LevelStats(), Usage: None}.get(type(value), Histogram().snapshot())


def test_labels_are_those_of_the_family() -> None:
    for family, samples in families(counted()):
        assert samples, family.name
        for sample in samples:
            assert tuple(sample.labels) == family.labels, family.name
        assert len({tuple(sample.labels.values()) for sample in samples}) == len(samples)


def test_buckets_hold_what_was_recorded() -> None:
    for family, samples in families(counted()):
        for sample in samples:
            assert bool(sample.buckets) == (family.kind == "histogram")
            counts = [count for _, count in sample.buckets]
            assert counts == sorted(counts)
    by_name = {family.name: samples for family, samples in families(counted())}
    [saves] = by_name["s3cache.save.duration"]
    assert saves.value == pytest.approx(1.11111)
    for bound, count in saves.buckets:
        if bound < 10:  # between two powers of ten there is no doubt about the bucket
            assert count == sum(10.0 ** (power - 5) < bound for power in range(6)), bound
    assert saves.buckets[-1] == (float("inf"), 6)


def test_the_counts_of_a_working_cache(tmp_path: Path) -> None:
    with Cache.open(f"file://{tmp_path / 'remote'}?create=1", local_dir=tmp_path / "tier") as cache:
        key = "key-1"
        assert isinstance(cache.lookup(key), Miss)
        cache.save(key, entry(key))
        assert cache.flush(60).complete
        cache.lookup(key)
        by_name = {family.name: samples for family, samples in families(cache.stats())}
        first = by_name["s3cache.hits"][0]
        assert (first.labels, first.value) == ({"level": "aot", "tier": "local"}, 1)
        assert [s.value for s in by_name["s3cache.saved"]] == [1, 0]
        assert [s.value for s in by_name["s3cache.local.files"]] == [1]
