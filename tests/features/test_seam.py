"""The core works without any of its features, and knows none of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from s3cache.features import FEATURES
from tests.support.machines import ROOT, Machine, remote_url
from tests.support.marks import nightly, slow


def shared_without(root: Path, *features: str) -> list[dict[str, Any]]:
    """Run a program on two machines without some features; return the outcomes of both."""
    job, url = "tests.features.without:shares", remote_url(root)
    return [
        Machine(root / name).run(job, features, url, str(root / name / "s3"), server=server).result
        for server, name in enumerate(("first", "second"))
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "features",
    [
        pytest.param(FEATURES, id="all"),
        *(
            pytest.param((x,), id=x, marks=slow if x in ("device", "ranks") else nightly)
            for x in FEATURES
        ),
    ],
)
def test_a_graph_is_shared_without(features: tuple[str, ...], tmp_path: Path) -> None:
    first, second = shared_without(tmp_path, *features)
    assert not {*features} & {*first["features"]}
    assert first["complete"]
    assert (first["saved"], sum(first["hits"].values())) == (1, 0), first
    assert (second["saved"], second["hits"].get("remote")) == (0, 1), second


# -- words

#: Words of each feature, in any case, and how often the core still has them: a limit to lower.
WORDS = {
    "startup": (r"start-?up|import_later", 0),
    "recall": (r"recall", 0),
    "ports": (r"helion|torchtitan", 0),
    "job_profile": (r"job.?profile|JOB_KEYS", 0),
    "target": (r"STANDIN|stand-in for (a|the) GPU|absent GPU|S3CACHE_TARGET", 0),
    "single_flight": (r"\b(claim|lease)s?\b|single.?flight|(?-i:WAITED)", 0),
    "ranks": (r"(?<![a-z])ranks?(?![a-z])", 0),
    "device": (r"\bseal|(?<!_)winner|unpickle_here|why_alone|DeviceConstraint", 0),
}
#: Names of torch's that have such words.
OF_TORCH = re.compile(r"_sync(_cache)?_decision_cross_ranks|\bpg_group_ranks\b|\bdist\.get_rank\b")


def core() -> dict[str, str]:
    """Return the texts of the core's files. ``options.py`` is written from all settings."""
    paths = [*(ROOT / "s3cache").rglob("*.py"), *ROOT.glob("_s3cache_*.py")]
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return {
        name: OF_TORCH.sub("", path.read_text(encoding="utf-8"))
        for name, path in names.items()
        if not name.startswith("s3cache/features/") and name != "s3cache/options.py"
    }


def test_each_feature_has_words() -> None:
    assert {*FEATURES} <= {*WORDS}


@pytest.mark.parametrize("feature", WORDS)
def test_the_core_has_no_words_of(feature: str) -> None:
    """Identifiers, strings and comments count, and so do words in other senses."""
    pattern, most = WORDS[feature]
    counts = {name: len(re.findall(pattern, text, re.IGNORECASE)) for name, text in core().items()}
    found = {name: count for name, count in counts.items() if count}
    assert sum(found.values()) <= most, found
