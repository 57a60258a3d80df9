"""The events of a session, to which features subscribe; see :mod:`s3cache.seam`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.seam import Notice

if TYPE_CHECKING:
    from s3cache.hooks._calls import Lookup


class CompileEvents:
    """The events of one session, as torch compiles.

    Attributes:
        looked_up: a whole graph that Dynamo has traced was looked up, or has no key.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.looked_up: Notice[[Lookup]] = Notice(strict=strict)
