"""Recall: Dynamo's result for a Python frame from another process, without tracing it again.

*Promises*: a frame is recalled only if everything that Dynamo read is as it was. If not, or if
anything fails, it is traced as without recall.

*Subscribes to*: ``looked_up``. It replaces functions of Dynamo when that is imported, and looks the
graphs of a frame up like any graph.

*Without it*: Dynamo traces each frame in each process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from s3cache.seam import Feature
from s3cache.util.options import INERT_DEVICE, choice, count, option
from s3cache.util.text import counted

#: The prefix of keys of frames; keys of graphs differ.
KEYS = "r"

Recall: TypeAlias = Literal["off", "check", "on", "auto"]
#: Why a frame cannot be recalled: ``docs/recall.md`` has a section on each.
RecallReason: TypeAlias = Literal[
    "aliasing",
    "backend",
    "code",
    "constant",
    "error",
    "filter",
    "global",
    "graphs",
    "guard",
    "modes",
    "object",
    "random",
    "second-level",
    "settings",
    "source",
    "subclass",
]


@dataclass(frozen=True, kw_only=True)
class RecallOptions:
    """The options of recall."""

    recall: Recall = option("auto", choice(*get_args(Recall)))
    recall_canary: int = option(50, count())


def _in_words(counts: Mapping[str, float]) -> str:
    """Return ``2 frames recalled, 1 traced``, and the refused or compared frames."""
    if not any(counts.values()):
        return ""
    refused, held_back = _by_code(counts, "refused"), _by_code(counts, "held_back")
    parts = [
        f"{counted(int(counts['recalled']), 'frame')} recalled",
        f"{counts['traced']} traced",
        held_back and f"{counts['held_back']} of them fitted ({held_back})",
        refused and f"{counts['refused']} refused ({refused})",
        counts["agreed"] and f"{counts['agreed']} agreed",
        counts["disagreed"] and f"{counts['disagreed']} disagreed",
    ]
    return ", ".join(str(part) for part in parts if part)


def _by_code(counts: Mapping[str, float], name: str) -> str:
    codes = {code[len(name) + 1 :]: n for code, n in counts.items() if code.startswith(f"{name}:")}
    return ", ".join(f"{number} {code}" for code, number in sorted(codes.items()))


FEATURE = Feature(
    name="recall",
    does="recalling frames without tracing them",
    options=RecallOptions,
    kinds=("recall",),
    codes=get_args(RecallReason),
    page="recall.md",
    # ``recalled``: without a trace; ``traced``: by Dynamo; ``saved``; ``agreed``, ``disagreed``:
    # traces with the same result as recall, or another (``check``); ``refused``: by reason.
    # ``held_back``: fitted but not used, by reason.
    counts=("recalled", "traced", "saved", "agreed", "disagreed", "refused", "held_back"),
    in_words=_in_words,
    # Frames may depend on computed values.
    is_used=lambda settings: settings.recall != "off" and not os.environ.get(INERT_DEVICE),
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
