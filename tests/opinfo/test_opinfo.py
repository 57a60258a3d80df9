"""A part of torch's operators, forward and backward; ``make test-opinfo`` has all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.opinfo.__main__ import PROCESS_TIMEOUT_S, run_twice
from tests.opinfo.verdicts import report, verdict

if TYPE_CHECKING:
    from pathlib import Path

# Of every kind: pointwise, reductions, views, indexing, scatter, sorting, linear algebra,
# convolution, pooling, losses, factories, several outputs. Each is one graph, which Dynamo does not
# break.
NAMES = (
    "add", "sigmoid", "clamp", "where", "isnan", "sum", "std", "argmax", "logsumexp", "cumsum",
    "view", "as_strided", "expand", "roll", "gather", "index_put", "scatter_add", "masked_fill",
    "sort", "topk", "diagonal", "unfold", "mm", "bmm", "addmm", "linalg_solve", "linalg_svd",
    "linalg_qr", "nn_functional_conv2d", "nn_functional_max_pool2d", "nn_functional_layer_norm",
    "nn_functional_batch_norm", "nn_functional_avg_pool2d",
    "nn_functional_embedding", "nn_functional_cross_entropy", "nn_functional_gelu",
    "nn_functional_interpolate_bilinear", "softmax", "arange", "chunk",
)  # fmt: skip


@pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)
def test_operators_hit_on_another_machine_with_equal_results(tmp_path: Path) -> None:
    first, second = run_twice(tmp_path, tmp_path / "first", list(NAMES), backward=True)
    verdicts = {name: verdict(first[name], second[name]) for name in NAMES}
    not_hit = {name: each for name, each in verdicts.items() if each[0] != "hit"}
    assert not_hit == {}, "\n".join(report(verdicts, ()))
