"""Whose code is it: decided by files, whatever names it bears."""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import numpy as np
import pytest
import torch

from s3cache.graph._distribution import origin_of


def posing(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.nn.functional.relu, "torch"),
        (torch.sin, "torch"),
        (torch.nn.Linear, "torch"),
        (torch.ops, "torch"),
        (math.sqrt, "python"),
        (functools.wraps, "python"),
        (dict, "python"),
        (np.mean, "library"),
        (np.ndarray, "library"),
        (pytest.fixture, "library"),
        (functools.wraps(torch.nn.functional.relu)(posing), "user"),
        (type("Linear", (), {"__module__": "torch.nn"}), "user"),
        (types.ModuleType("mine"), "user"),
        (type("Meta", (type,), {"__module__": property(id)})("Kind", (), {}), "user"),
    ],
)
def test_whose_it_is(value: object, kind: str) -> None:
    assert origin_of(value).kind == kind
