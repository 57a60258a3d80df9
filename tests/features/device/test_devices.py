"""Ranks share all code, unless it may contain the number of a rank or of its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3cache import frame
from s3cache.features.device.moving import why_alone
from s3cache.torch_api.internals import collectives_of
from tests.support.marks import slow
from tests.support.sites import Machine, Site

# -- the rank


def run(machine: Machine, url: str) -> list[dict[str, Any]]:
    """Return the outcome of each program on two ranks."""
    return machine.ranks(2, "collectives:outcomes", url)


def places(site: Site) -> dict[Path, str | None]:
    """Return the only rank that each entry of a whole graph serves, or None."""
    headers = {path: frame.decode(path.read_bytes()).header for path in site.entries()}
    found = {path: each.meta for path, each in headers.items() if each.kind == "aot"}
    return {path: (meta.get("place") or {}).get("rank") for path, meta in found.items()}


@slow
@pytest.mark.timeout(600)
def test_code_that_may_hold_the_rank_serves_that_rank_alone(site: Site) -> None:
    """All ranks share code that calls the traced collectives and has no number of a rank."""
    cold = run(site.machine("cold"), site.url)
    entries = places(site)
    # Merged collectives: an entry for each rank, under one key. A rank or its own group in the
    # graph: a key for each rank. Other programs: one entry.
    of_ranks = {path: rank for path, rank in entries.items() if rank}
    assert sorted(rank[:6] for rank in of_ranks.values()) == ["rank 0", "rank 1"]
    assert len({path.name[:64] for path in of_ranks}) == 1
    assert len(entries) == len(of_ranks) + len(["all-gathers", "all-reduce"]) + 3 * 2

    # The first entry under a key stays: without it, a lookup finds no other.
    gone = next(path for path in of_ranks if not path.name.endswith(".0"))
    gone.unlink()
    lacking = int(of_ranks[gone][5])
    warm = run(site.machine("warm"), site.url)
    for rank, (before, after) in enumerate(zip(cold, warm, strict=True)):
        assert "a group of its own" in before
        for name in before:
            assert before[name]["is_right"], name
            assert after[name]["is_right"], name
            is_lacking = name == "all-gathers that are merged" and rank == lacking
            assert sum(after[name]["hits"].values()) == (not is_lacking), name
    (why,) = warm[lacking]["all-gathers that are merged"]["why"]
    assert f"its code may contain the number of rank {1 - lacking} of 2" in why


def test_calls_of_collectives_are_counted_by_kind() -> None:
    code = """
    # torch.ops._c10d_functional.all_reduce.default(a)
    buf0 = torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
    buf1 = torch.ops._c10d_functional.all_gather_into_tensor_out.default(buf0, 2, '0', out=buf1)
    torch.ops._c10d_functional.wait_tensor.default(buf1)
    assert_size_stride(buf1, (8,), (1,), 'torch.ops._c10d_functional.all_reduce.default')
    torch.ops.aten.sum.default(buf1)
    """
    assert collectives_of(code) == {"all_reduce": 1, "all_gather_into_tensor": 1}


# -- the device


class Compiled:
    """A graph for ``cuda:1``."""

    def __init__(self, source_code: str, indices: set[int] | None = None) -> None:
        self.source_code = source_code
        self.device_types = {"cuda"}
        self.device_idxs = {1} if indices is None else indices


KNOWN = """
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
# %x : Tensor "f32[8][1]cuda:1" = PlaceHolder
kernel = async_compile.triton('kernel', '''
    triton_meta={'device': DeviceProperties(type='cuda', index=1, cc=90), 'configs': [1]},
@triton.jit
def kernel(stream_of_mine, device_rank):
    pass
''', device_str='cuda')
with torch.cuda._DeviceGuard(1):
    torch.cuda.set_device(1)
    raw_stream1 = get_raw_stream(1)
    kernel.run(torch.ops.aten.full([1], 1, device=device(type='cuda', index=1)), stream=raw_stream1)
x = rand_strided((8,), (1,), device='cuda:1')
"""


def test_code_moves_if_it_names_devices_only_in_known_forms() -> None:
    assert why_alone([Compiled(KNOWN)], "cuda:1") is None


@pytest.mark.parametrize(
    "code",
    [
        "launch(device_index=1)",
        "AOTICudaStreamGuard stream_guard(stream, 1);",
        "torch.cuda.default_stream(1)",
        "x = torch.ops.mine.op(device(type='cuda', index=2))",
        "y = x.to('cuda:2')",
        "on_device_1(x)",
    ],
)
def test_code_that_names_a_device_in_any_other_form_stays(code: str) -> None:
    assert why_alone([Compiled(KNOWN + code)], "cuda:1")


def test_code_for_several_devices_stays() -> None:
    assert why_alone([Compiled(KNOWN, {1, 2})], "cuda:1") == "it is for several devices"
