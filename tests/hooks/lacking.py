"""Jobs with a torch that lacks a name that s3cache uses, or with a torch that is too new."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch

import s3cache
from s3cache.errors import UnsupportedTorchError
from s3cache.settings import WATCHED
from s3cache.torch_api import Fields, Internal, declarations, internals
from tests.hooks.jobs import account


def product(x: Any, y: Any) -> Any:
    """A graph that Inductor compiles without a C++ compiler."""
    return (x @ y).t()


class Warnings(logging.Handler):
    """A handler that collects the warnings of s3cache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("s3cache").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _compiled(url: str, **options: Any) -> dict[str, Any]:
    """Compile the graph; return whether it equals eager mode, and the counts."""
    torch.compiler.reset()
    x = torch.arange(9.0).reshape(3, 3)
    with s3cache.enabled(url, **options) as cache:
        is_right = torch.allclose(torch.compile(product)(x, x), product(x, x))
        return {**account(cache), "right": is_right}


def names(url: str, step: int) -> list[dict[str, Any]]:
    """Look up an entry without each ``step``-th name of torch; return the outcomes."""
    os.environ[WATCHED] = "1"  # every feature is in use
    warnings = Warnings()
    _compiled(url)
    internals = [each for each in declarations if isinstance(each, Internal) and each.expected]
    optional = [each for each in internals if each.feature]
    found = []
    for internal in [*optional, *(each for each in internals if not each.feature)][::step]:
        place, internal.place = internal.place, "torch._guards:nonsense"
        with contextlib.suppress(UnsupportedTorchError):
            internal.bind()
        warnings.messages.clear()
        try:
            ran = _compiled(url)
            outcome = {"hits": sum(ran["hits"].values()), "right": ran["right"]}
        except Exception as exc:
            outcome = {"raised": repr(exc)}
        finally:
            internal.place = place
            internal.bind()
        warned = list(warnings.messages)
        found.append({"name": place, "feature": internal.feature, "warned": warned, **outcome})
    return found


def newer(url: str, lacks: str = "") -> dict[str, Any]:
    """Compile with a torch newer than any tested one; guards lack the attribute ``lacks``."""
    warnings = Warnings()
    internals.OLDEST, internals.NEWEST = (2, 9), (2, 10)
    if lacks:
        Fields("torch._guards:Guard", lacks)
    _compiled(url)
    return {**_compiled(url), "warned": warnings.messages}
