"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Check", "Verdict", "fault", "ok", "skipped", "warning"]

#: A ``fault`` keeps the cache from doing its work, a ``warning`` does not.
Verdict: TypeAlias = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at.

    Attributes:
        name: the thing, in a word or two.
        found: what is the matter with it, or that nothing is.
        fix: what to do; empty where nothing is to be done.
        code: what ``s3cache explain`` says more of; empty where the fix says it all.
    """

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    code: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warning(name: str, found: str, fix: str, code: str = "") -> Check:
    return Check(name, "warning", found, fix, code)


def fault(name: str, found: str, fix: str, code: str = "") -> Check:
    return Check(name, "fault", found, fix, code)


def skipped(name: str, why: str) -> Check:
    return Check(name, "skipped", why)
