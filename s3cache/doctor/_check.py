"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Check", "Name", "Verdict", "fault", "ok", "skipped", "warning"]

#: A ``fault`` keeps the cache from doing its work, a ``warning`` does not.
Verdict: TypeAlias = Literal["ok", "warning", "fault", "skipped"]

#: The things that are looked at, each with a section of ``docs/doctor.md``.
Name: TypeAlias = Literal[
    "settings",
    "mode",
    "remote",
    "credentials",
    "list",
    "get",
    "put",
    "conditional put",
    "read back",
    "clock",
    "latency",
    "delete",
    "local directory",
    "disk",
    "space",
    "inodes",
    "execution",
    "torch's directory",
    "torch",
    "compiler",
    "CPU",
    "trust",
    "signing",
]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at.

    Attributes:
        name: the thing, in a word or two.
        found: what is the matter with it, or that nothing is.
        fix: what to do; empty where nothing is to be done.
        code: what ``s3cache explain`` says more of, beside the check itself, if anything.
    """

    name: Name
    verdict: Verdict
    found: str
    fix: str = ""
    code: str = ""

    @property
    def section(self) -> str:
        """What ``s3cache explain`` calls the check: ``read-back``, ``torch-directory``."""
        return self.name.replace("'s", "").replace(" ", "-").casefold()

    @property
    def codes(self) -> tuple[str, ...]:
        """What ``s3cache explain`` says more of; nothing where all is well."""
        if self.verdict in ("ok", "skipped"):
            return ()
        return tuple(filter(None, (self.section, self.code)))


def ok(name: Name, found: str) -> Check:
    return Check(name, "ok", found)


def warning(name: Name, found: str, fix: str, code: str = "") -> Check:
    return Check(name, "warning", found, fix, code)


def fault(name: Name, found: str, fix: str, code: str = "") -> Check:
    return Check(name, "fault", found, fix, code)


def skipped(name: Name, why: str) -> Check:
    return Check(name, "skipped", why)
