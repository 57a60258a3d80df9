"""The events of a session, to which features subscribe; see :mod:`s3cache.seam`."""

from __future__ import annotations


class CompileEvents:
    """The events of one session, as torch compiles.

    Attributes:
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
