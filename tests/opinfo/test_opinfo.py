"""Some of torch's operators, forward and backward.

``make test-all`` runs a few, ``make test-nightly`` some of each kind, and
``python -m tests.opinfo`` all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.opinfo.__main__ import PROCESS_TIMEOUT_S, report, run_twice, verdict
from tests.support.marks import nightly, slow

# Operators of each kind: pointwise, reductions, views, indexing, scatter, sorting, linear algebra,
# convolution, pooling, losses, factories, several outputs. Dynamo compiles each to one graph.
A_FEW = (
    "add", "index_put", "addmm", "nn_functional_conv2d",
)  # fmt: skip
OTHERS = (
    "view", "nn_functional_cross_entropy", "arange", "chunk",
    "std", "scatter_add", "topk", "nn_functional_max_pool2d",
    "sigmoid", "clamp", "where", "isnan", "sum", "argmax", "logsumexp", "cumsum",
    "as_strided", "expand", "roll", "gather", "masked_fill",
    "sort", "diagonal", "unfold", "mm", "bmm", "linalg_solve", "linalg_svd",
    "linalg_qr", "nn_functional_layer_norm",
    "nn_functional_batch_norm", "nn_functional_avg_pool2d",
    "nn_functional_embedding", "nn_functional_gelu",
    "nn_functional_interpolate_bilinear", "softmax",
)  # fmt: skip


@slow
@pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)
@pytest.mark.parametrize(
    "names",
    [pytest.param(A_FEW, id="a few"), pytest.param(OTHERS, id="others", marks=nightly)],
)
def test_operators_hit_on_another_machine_with_equal_results(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    first, second = run_twice(
        *(tmp_path, tmp_path / "first", list(names)), backward=True, forked=names is A_FEW
    )
    verdicts = {name: verdict(first[name], second[name]) for name in names}
    not_hit = {name: each for name, each in verdicts.items() if each[0] != "hit"}
    assert not_hit == {}, "\n".join(report(verdicts))
