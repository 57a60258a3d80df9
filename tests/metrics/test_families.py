"""Every count is in a metric with a conventional name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from s3cache.metrics import FAMILIES, families
from s3cache.stats import CacheStats, LevelStats
from tests.metrics.counts import counted


def test_names_follow_the_rules_of_both_ecosystems() -> None:
    """See https://opentelemetry.io/docs/specs/semconv/general/naming/ and Prometheus' own rules."""
    for family in FAMILIES:
        assert re.fullmatch(r"s3cache(\.[a-z]+(_[a-z]+)*)+", family.name), family
        assert family.unit in ("s", "By") or re.fullmatch(r"\{[a-z]+\}", family.unit), family
        assert family.text.endswith("."), family
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.prometheus_name.replace("s3", "s")), family
        assert not family.prometheus_name.endswith("_total"), "the client adds this suffix"
        if family.kind == "histogram":
            assert family.prometheus_name.endswith("_seconds")
    for names in ([f.name for f in FAMILIES], [f.prometheus_name for f in FAMILIES]):
        assert len({*names}) == len(names)


def test_every_count_changes_a_metric() -> None:
    """Each count is removed in turn, and this changes a metric."""
    stats = counted()
    less = {name: replace(stats, **blank) for name, blank in _blanks(stats)}
    less |= {
        f"fx.{name}": replace(stats, fx=replace(stats.fx, **blank))
        for name, blank in _blanks(stats.fx)
    }
    unseen = {name for name, each in less.items() if families(each) == families(stats)}
    # Saved bytes are counted at their upload. Superseded halves were never shared.
    assert unseen == {"saved_bytes", "fx.contained"}


def _blanks(stats: CacheStats | LevelStats) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field and, as arguments of ``replace``, its value in a new cache."""
    for field in dataclasses.fields(stats):
        blank = getattr(CacheStats(), field.name, 0)
        yield field.name, {field.name: blank}


def test_samples_have_the_labels_and_buckets_of_their_family() -> None:
    found = {family.name: samples for family, samples in families(counted())}
    for family in FAMILIES:
        samples = found[family.name]
        assert samples, family.name
        assert {tuple(sample.labels) for sample in samples} == {family.labels}, family.name
        assert len({tuple(sample.labels.values()) for sample in samples}) == len(samples)
        for sample in samples:
            assert bool(sample.buckets) == (family.kind == "histogram")
            counts = [count for _, count in sample.buckets]
            assert counts == sorted(counts)
    [saves] = found["s3cache.save.duration"]
    assert saves.value == pytest.approx(1.11111)
    for bound, count in saves.buckets:
        if bound < 10:  # the bucket of each value is certain up to 10
            assert count == sum(10.0 ** (power - 5) < bound for power in range(6)), bound
    assert saves.buckets[-1] == (float("inf"), 6)
