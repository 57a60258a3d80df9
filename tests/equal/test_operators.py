"""Some of torch's operators, forward and backward.

``make test-all`` runs a few, ``make test-nightly`` some of each kind, and
``python -m tests.equal.operators`` all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.marks import nightly, slow

# Operators of each kind: pointwise, reductions, views, indexing, scatter, sorting, linear algebra,
# convolution, pooling, losses, factories, several outputs. Dynamo compiles each to one graph.
A_FEW = "add index_put addmm nn_functional_conv2d"
OTHERS = (
    "view nn_functional_cross_entropy arange chunk std scatter_add topk nn_functional_max_pool2d"
    " sigmoid clamp where isnan sum argmax logsumexp cumsum as_strided expand roll gather"
    " masked_fill sort diagonal unfold mm bmm linalg_solve linalg_svd linalg_qr"
    " nn_functional_layer_norm nn_functional_batch_norm nn_functional_avg_pool2d"
    " nn_functional_embedding nn_functional_gelu nn_functional_interpolate_bilinear softmax"
)


@slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "words",
    [pytest.param(A_FEW, id="a few"), pytest.param(OTHERS, id="others", marks=nightly)],
)
def test_operators_hit_on_another_machine_with_equal_results(words: str, tmp_path: Path) -> None:
    from tests.equal.operators import BACKWARD, report, run_twice, verdict  # torch's own tests

    names = [BACKWARD + name for name in words.split()]
    first, second = run_twice(tmp_path, tmp_path / "first", names, forked=words is A_FEW)
    verdicts = {name: verdict(first[name], second[name]) for name in names}
    not_hit = {name: each for name, each in verdicts.items() if each[0] != "hit"}
    assert not_hit == {}, "\n".join(report(verdicts))
