"""Operators with values for each argument: first the value of the base program, then others.

There are one or a few operators for each kind of argument: a number, a size, a flag, a type, a
word, a function of several calls, a random draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

Operator = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, list[Any]]]

_X = ((4, 8),)
_XX = ((4, 8), (4, 8))
_IMAGE = ((1, 2, 8, 8),)
_DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
_REDUCTION = ["mean", "sum", "none"]


def _reducing(function: Callable[..., Any], **more: list[Any]) -> Operator:
    return function, _X, {"dim": [1, 0, -1, -2], "keepdim": [False, True], **more}


def _scalar(function: Callable[..., Any], *values: Any) -> Operator:
    return function, _X, {"value": list(values)}


OPERATORS: dict[str, Operator] = {
    "sum": _reducing(torch.sum, dtype=[None, torch.float64, torch.bfloat16]),
    "var": _reducing(torch.var, correction=[1, 0, 2]),
    "softmax": (torch.softmax, _X, {"dim": [1, 0, -2], "dtype": [None, torch.float64]}),
    # shapes
    "reshape": (torch.reshape, _X, {"shape": [(8, 4), (2, 16), (32,), (2, 2, 8), (-1, 2)]}),
    "narrow": (torch.narrow, _X, {"dim": [0, 1], "start": [0, 1, 2], "length": [1, 2]}),
    "split": (torch.split, _X, {"split_size_or_sections": [2, 1, (1, 3)], "dim": [0]}),
    "pad": (F.pad, _X, {"pad": [(1, 1), (0, 2), (1, 1, 1, 1)], "value": [0.0, 1.0, -2.5]}),
    "cat": (lambda a, b, dim: torch.cat((a, b), dim), _XX, {"dim": [0, 1, -2]}),
    "as_strided": (
        lambda x, size, stride, offset: torch.as_strided(x, size, stride, offset) * 2,
        _X,
        {"size": [(2, 3), (3, 2)], "stride": [(8, 1), (1, 8), (4, 2)], "offset": [0, 1, 5]},
    ),
    "slice": (
        lambda x, start, stop, step: x[:, start:stop:step] * 2,
        _X,
        {"start": [0, 1, -4], "stop": [8, 6, -1], "step": [1, 2, 3]},
    ),
    # elements
    "add": (torch.add, _XX, {"alpha": [1, 2, -0.5, 3.5]}),
    "clamp": (torch.clamp, _X, {"min": [0.1, 0.0, None, 0.4], "max": [0.5, 0.6, 2.0, 0.9]}),
    "pow": _scalar(lambda x, value: x**value, 2, 3, 0.5, -1, 0, 1, 2.5),
    "full": _scalar(lambda x, value: x + torch.full((8,), value), 0.0, 1.0, 2.5),
    "to": (lambda x, dtype: x.to(dtype), _X, {"dtype": _DTYPES[1:]}),
    "type_promotion": (lambda x, dtype: x + torch.ones(8, dtype=dtype), _X, {"dtype": _DTYPES}),
    "topk": (torch.topk, _X, {"k": [2, 1, 3], "dim": [1, 0], "largest": [True, False]}),
    # made without inputs
    "arange": (
        lambda x, start, end, step: x.sum() + torch.arange(start, end, step),
        _X,
        {"start": [0, 1, 2.0], "end": [8, 9, 10], "step": [1, 2, 3]},
    ),
    # networks
    "gelu": (F.gelu, _X, {"approximate": ["none", "tanh"]}),
    "layer_norm": (F.layer_norm, _X, {"normalized_shape": [(8,), (4, 8)], "eps": [1e-5, 1e-3]}),
    "dropout": (F.dropout, _X, {"p": [0.5, 0.1, 0.9], "training": [False, True]}),
    "cross_entropy": (
        lambda x, **how: F.cross_entropy(x, x.argmax(1), **how),
        _X,
        {"label_smoothing": [0.0, 0.1], "ignore_index": [-100, 0, 3], "reduction": _REDUCTION},
    ),
    "avg_pool2d": (
        F.avg_pool2d,
        _IMAGE,
        {
            "kernel_size": [2, 3, (2, 3)],
            "stride": [2, 1, 3],
            "padding": [0, 1],
            "ceil_mode": [False, True],
            "divisor_override": [None, 3, 5],
        },
    ),
    "interpolate": (
        F.interpolate,
        _IMAGE,
        {"scale_factor": [2.0, 1.5, 0.5], "mode": ["nearest", "bilinear", "bicubic", "area"]},
    ),
    "conv2d": (
        F.conv2d,
        ((1, 4, 8, 8), (4, 2, 3, 3)),
        {
            "stride": [1, 2, (1, 2)],
            "padding": [0, 1, (1, 0), "same"],
            "dilation": [1, 2, (2, 1)],
            "groups": [2],
        },
    ),
    "embedding": (
        lambda w, **how: F.embedding(torch.arange(3), w, **how),
        _X,
        {"padding_idx": [None, 0, 2], "scale_grad_by_freq": [False, True]},
    ),
    "attention": (
        F.scaled_dot_product_attention,
        ((1, 2, 4, 8),) * 3,
        {"is_causal": [False, True], "scale": [None, 0.5, 1.0], "dropout_p": [0.0, 0.1]},
    ),
    # matrices
    "einsum": (
        lambda a, b, equation: torch.einsum(equation, a, b),
        ((4, 4), (4, 4)),
        {"equation": ["ij,jk->ik", "ij,kj->ik", "ij,ij->ij", "ij,ij->i", "ij,jk->ki"]},
    ),
    # indices
    "index_select": (
        lambda x, dim, which: torch.index_select(x, dim, torch.tensor(which)),
        _X,
        {"dim": [0, 1], "which": [[0, 1], [1, 0], [2], [0, 0, 3]]},
    ),
    "scatter_reduce": (
        lambda x, **how: x.scatter_reduce(0, torch.zeros(4, 8, dtype=torch.int64), x, **how),
        _X,
        {"reduce": ["sum", "amax", "mean", "prod"], "include_self": [True, False]},
    ),
    # randomness: the keys must differ, even if the numbers do not
    "bernoulli": (lambda x, p: torch.bernoulli(x * p), _X, {"p": [0.5, 0.1]}),
}
