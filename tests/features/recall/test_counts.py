"""Frames are counted, and the summary has the counts."""

from __future__ import annotations

import json

from s3cache.features.recall import FEATURE
from s3cache.stats import CacheStats, Counters, FeatureCounters


def test_frames_are_counted_in_words_if_recall_is_on() -> None:
    """If recall is off, frames are not mentioned."""
    counters, frames = Counters(), FeatureCounters(FEATURE)
    off = counters.read(CacheStats, features={"recall": frames.snapshot()})
    assert "frame" not in off.in_words()
    assert "recall" not in off.in_numbers()
    for name, label in (("recalled", ""), ("recalled", ""), ("traced", ""), ("refused", "object")):
        frames.count(name, label)
    on = counters.read(CacheStats, features={"recall": frames.snapshot()})
    assert "; 2 frames recalled, 1 traced, 1 refused (1 object); " in on.in_words()
    numbers = json.loads(json.dumps(on.in_numbers()))["recall"]
    assert (numbers["recalled"], numbers["refused"]) == (2, 1)
    frames.count("disagreed")
    frames.count("agreed")
    assert FEATURE.in_words(frames.snapshot()).endswith(", 1 agreed, 1 disagreed")
