"""A miss of a frame is explained by the part of its key that differs, or by what was read."""

from __future__ import annotations

from pathlib import Path

from tests.support.machines import Machine
from tests.support.marks import slow


def misses(url: str, options: dict[str, bool], sizes: list[int]) -> list[list[str]]:
    """Compile a function for each size; return the explanations of its frames."""
    import torch

    import s3cache

    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with (
        s3cache.enabled(url, recall="on", job_profiles=False) as cache,
        torch._dynamo.config.patch(options),
    ):
        for size in sizes:
            torch.compile(square)(torch.ones(size, size))
        cache.flush(30)
        explained = s3cache.explain().explanations
    return [[each.record.reason, each.line] for each in explained if each.record.kind == "recall"]


@slow
def test_the_label_that_differs_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote?create=1"
    found = [
        Machine(tmp_path / name).run(f"{__name__}:misses", url, options, sizes, server=0).result
        for name, options, sizes in (
            ("one", {}, [4]),
            ("two", {"specialize_float": True}, [4]),
            ("three", {}, [5]),
        )
    ]
    (first,), ((reason, line),), (other,) = found
    assert first[0] == reason == "absent"
    assert "dynamo.config" in line
    assert other == ["guard", "size of L['x']"]
