"""The bound of a wait in a job of several ranks."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from s3cache.features.single_flight.install import group_timeout_s


def test_a_wait_is_bounded_by_the_time_out_of_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert group_timeout_s() == math.inf
    store = HashStore()
    store.set_timeout(timedelta(seconds=90))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert group_timeout_s() == 90
