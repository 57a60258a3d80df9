"""Startup: the import of torch's compiler defers what a hit does not need, and collects no garbage.

*Promises*: a program finds the same modules, templates and errors, only later. Each step may fail
alone, and silently: torch then does the work at import.

*Subscribes to*: no event; it waits for imports of modules of torch.

*Without it*: the first hit of a process comes later by some tenths of a second.
"""

from __future__ import annotations

from s3cache.seam import Feature

FEATURE = Feature(
    name="startup",
    does="deferring work in the import of torch's compiler",
    waits=f"{__name__}.garbage:without_collections",
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
