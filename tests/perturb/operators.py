"""Operators, and for each argument the value of the base program first and then others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does

__all__ = ["OPERATORS"]

Operator = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, list[Any]]]

_X = ((4, 8),)
_XX = ((4, 8), (4, 8))
_IMAGE = ((1, 2, 8, 8),)
_IMAGE3 = ((1, 2, 6, 6, 6),)
_ROW = ((1, 2, 12),)
_DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
_ROUNDING = [None, "floor", "trunc"]
_REDUCTION = ["mean", "sum", "none"]


def _reducing(function: Callable[..., Any], **more: list[Any]) -> Operator:
    return function, _X, {"dim": [1, 0, -1, -2], "keepdim": [False, True], **more}


def _scalar(function: Callable[..., Any], *values: Any) -> Operator:
    return function, _X, {"value": list(values)}


OPERATORS: dict[str, Operator] = {
    # reductions
    "sum": _reducing(torch.sum, dtype=[None, torch.float64, torch.bfloat16]),
    "mean": _reducing(torch.mean, dtype=[None, torch.float64]),
    "prod": _reducing(torch.prod),
    "amax": _reducing(torch.amax),
    "amin": _reducing(torch.amin),
    "logsumexp": _reducing(torch.logsumexp),
    "argmax": _reducing(torch.argmax),
    "argmin": _reducing(torch.argmin),
    "all": _reducing(torch.all),
    "any": _reducing(torch.any),
    "var": _reducing(torch.var, correction=[1, 0, 2]),
    "std": _reducing(torch.std, correction=[1, 0, 2]),
    "norm": _reducing(torch.norm, p=[2, 1, 3, float("inf")]),
    "median": _reducing(torch.median),
    "nansum": _reducing(torch.nansum),
    "count_nonzero": (torch.count_nonzero, _X, {"dim": [1, 0, None]}),
    "cumsum": (torch.cumsum, _X, {"dim": [1, 0, -2], "dtype": [None, torch.float64]}),
    "cumprod": (torch.cumprod, _X, {"dim": [1, 0, -2]}),
    "logcumsumexp": (torch.logcumsumexp, _X, {"dim": [1, 0]}),
    "softmax": (torch.softmax, _X, {"dim": [1, 0, -2], "dtype": [None, torch.float64]}),
    "log_softmax": (torch.log_softmax, _X, {"dim": [1, 0, -2], "dtype": [None, torch.float64]}),
    # shapes
    "transpose": (torch.transpose, ((2, 4, 8),), {"dim0": [0, 1, 2], "dim1": [1, 0, 2]}),
    "permute": (torch.permute, ((2, 4, 8),), {"dims": [(0, 1, 2), (2, 1, 0), (1, 0, 2)]}),
    "reshape": (torch.reshape, _X, {"shape": [(8, 4), (2, 16), (32,), (2, 2, 8), (-1, 2)]}),
    "flatten": (torch.flatten, ((2, 4, 8),), {"start_dim": [0, 1], "end_dim": [-1, 1]}),
    "unsqueeze": (torch.unsqueeze, _X, {"dim": [0, 1, 2, -2]}),
    "flip": (torch.flip, _X, {"dims": [(0,), (1,), (0, 1)]}),
    "roll": (torch.roll, _X, {"shifts": [1, 2, -3], "dims": [0, 1]}),
    "rot90": (torch.rot90, _X, {"k": [1, 2, 3, -1], "dims": [(0, 1), (1, 0)]}),
    "narrow": (torch.narrow, _X, {"dim": [0, 1], "start": [0, 1, 2], "length": [1, 2]}),
    "select": (torch.select, _X, {"dim": [0, 1], "index": [0, 1, 3, -1]}),
    "tile": (torch.tile, _X, {"dims": [(1, 2), (2, 1), (3,)]}),
    "repeat_interleave": (torch.repeat_interleave, _X, {"repeats": [2, 3], "dim": [0, 1, None]}),
    "chunk": (torch.chunk, _X, {"chunks": [2, 3, 4], "dim": [0, 1]}),
    "split": (torch.split, _X, {"split_size_or_sections": [2, 1, (1, 3)], "dim": [0]}),
    "unfold": (
        lambda x, dim, size, step: x.unfold(dim, size, step),
        _X,
        {"dim": [1, 0], "size": [2, 3, 4], "step": [1, 2, 3]},
    ),
    "diagonal": (torch.diagonal, _X, {"offset": [0, 1, -1, 3], "dim1": [0], "dim2": [1]}),
    "tril": (torch.tril, _X, {"diagonal": [0, 1, -1, 4]}),
    "triu": (torch.triu, _X, {"diagonal": [0, 1, -1, 4]}),
    "pad": (
        F.pad,
        _X,
        {"pad": [(1, 1), (0, 2), (1, 1, 1, 1), (-1, 1)], "value": [0.0, 1.0, -2.5]},
    ),
    "reflect": (F.pad, ((1, 2, 8),), {"pad": [(1, 1), (2, 0)], "mode": ["reflect", "replicate"]}),
    "cat": (lambda a, b, dim: torch.cat((a, b), dim), _XX, {"dim": [0, 1, -2]}),
    "stack": (lambda a, b, dim: torch.stack((a, b), dim), _XX, {"dim": [0, 1, 2]}),
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
    "sub": (torch.sub, _XX, {"alpha": [1, 2, -0.5]}),
    "div": (torch.div, _XX, {"rounding_mode": _ROUNDING}),
    "lerp": (torch.lerp, _XX, {"weight": [0.5, 0.0, 0.25, 2.0]}),
    "addcmul": (torch.addcmul, ((4, 8),) * 3, {"value": [1, 2, -0.5]}),
    "addcdiv": (torch.addcdiv, ((4, 8),) * 3, {"value": [1, 2, -0.5]}),
    "clamp": (torch.clamp, _X, {"min": [0.1, 0.0, None, 0.4], "max": [0.5, 0.6, 2.0, 0.9]}),
    "pow": _scalar(lambda x, value: x**value, 2, 3, 0.5, -1, 0, 1, 2.5),
    "rpow": _scalar(lambda x, value: value**x, 2, 3, 0.5, 10),
    "times": _scalar(lambda x, value: x * value, 2, 3, 2.0, 0.1, -1, True),
    "plus": _scalar(lambda x, value: x + value, 2, 3, 2.0, 0.1, -1, True, 1e-9),
    "floordiv": _scalar(lambda x, value: x // value, 2, 3, 0.1, -1),
    "modulo": _scalar(lambda x, value: x % value, 2, 3, 0.1, -1),
    "greater": _scalar(lambda x, value: x > value, 0.5, 0.1, 0, 0.9),
    "where": _scalar(lambda x, value: torch.where(x > 0.5, x, value), 0.0, 1.0, -1.0),
    "full": _scalar(lambda x, value: x + torch.full((8,), value), 0.0, 1.0, 2.5),
    "fill": _scalar(lambda x, value: x.clone().fill_(value) + x, 0.0, 1.0, 2.5),
    "masked_fill": _scalar(lambda x, value: x.masked_fill(x > 0.5, value), 0.0, 1.0, -2.5),
    "round": (torch.round, _X, {"decimals": [0, 1, 2, -1]}),
    "nan_to_num": (torch.nan_to_num, _X, {"nan": [0.0, 1.0], "posinf": [None, 2.0]}),
    "logit": (torch.logit, _X, {"eps": [None, 1e-6, 0.1]}),
    "to": (lambda x, dtype: x.to(dtype), _X, {"dtype": _DTYPES[1:]}),
    "type_promotion": (lambda x, dtype: x + torch.ones(8, dtype=dtype), _X, {"dtype": _DTYPES}),
    "sort": (torch.sort, _X, {"dim": [1, 0], "descending": [False, True], "stable": [False, True]}),
    "topk": (
        torch.topk,
        _X,
        {"k": [2, 1, 3], "dim": [1, 0], "largest": [True, False], "sorted": [True, False]},
    ),
    "kthvalue": (torch.kthvalue, _X, {"k": [2, 1, 3], "dim": [1, 0]}),
    # made from nothing
    "arange": (
        lambda x, start, end, step: x.sum() + torch.arange(start, end, step),
        _X,
        {"start": [0, 1, 2.0], "end": [8, 9, 10], "step": [1, 2, 3]},
    ),
    "linspace": (
        lambda x, end, steps: x.sum() + torch.linspace(0, end, steps),
        _X,
        {"end": [1, 2, 5], "steps": [4, 5, 9]},
    ),
    "eye": (lambda x, n, m: x.sum() + torch.eye(n, m), _X, {"n": [3, 4], "m": [3, 4, 5]}),
    "one_hot": (
        lambda x, num_classes: F.one_hot((x * 4).long(), num_classes),
        _X,
        {"num_classes": [5, 6, 9]},
    ),
    # networks
    "gelu": (F.gelu, _X, {"approximate": ["none", "tanh"]}),
    "leaky_relu": (F.leaky_relu, _X, {"negative_slope": [0.01, 0.1, 0.5], "inplace": [False]}),
    "elu": (F.elu, _X, {"alpha": [1.0, 0.5, 2.0]}),
    "celu": (F.celu, _X, {"alpha": [1.0, 0.5, 2.0]}),
    "softplus": (F.softplus, _X, {"beta": [1, 2, 0.5], "threshold": [20, 1, 0.1]}),
    "hardtanh": (F.hardtanh, _X, {"min_val": [-1.0, 0.0, 0.3], "max_val": [1.0, 0.5, 0.4]}),
    "threshold": (F.threshold, _X, {"threshold": [0.5, 0.1], "value": [0.0, 1.0]}),
    "softshrink": (F.softshrink, _X, {"lambd": [0.5, 0.1, 0.2]}),
    "hardshrink": (F.hardshrink, _X, {"lambd": [0.5, 0.1, 0.2]}),
    "glu": (F.glu, _X, {"dim": [-1, 0]}),
    "layer_norm": (
        F.layer_norm,
        _X,
        {"normalized_shape": [(8,), (4, 8)], "eps": [1e-5, 1e-3, 0.1]},
    ),
    "rms_norm": (F.rms_norm, _X, {"normalized_shape": [(8,), (4, 8)], "eps": [1e-5, 1e-3, 0.1]}),
    "group_norm": (F.group_norm, _IMAGE, {"num_groups": [1, 2], "eps": [1e-5, 1e-3]}),
    "instance_norm": (F.instance_norm, _IMAGE, {"eps": [1e-5, 1e-3, 0.1]}),
    "normalize": (F.normalize, _X, {"p": [2.0, 1.0, 3.0], "dim": [1, 0], "eps": [1e-12, 0.5]}),
    "cosine_similarity": (F.cosine_similarity, _XX, {"dim": [1, 0], "eps": [1e-8, 3.0]}),
    "dropout": (F.dropout, _X, {"p": [0.5, 0.1, 0.9], "training": [False, True]}),
    "mse_loss": (F.mse_loss, _XX, {"reduction": _REDUCTION}),
    "l1_loss": (F.l1_loss, _XX, {"reduction": _REDUCTION}),
    "huber_loss": (F.huber_loss, _XX, {"reduction": _REDUCTION, "delta": [1.0, 0.1, 0.3]}),
    "smooth_l1": (F.smooth_l1_loss, _XX, {"reduction": _REDUCTION, "beta": [1.0, 0.1, 0.3]}),
    "bce": (F.binary_cross_entropy, _XX, {"reduction": _REDUCTION}),
    "kl_div": (F.kl_div, _XX, {"reduction": _REDUCTION, "log_target": [False, True]}),
    "cross_entropy": (
        lambda x, **how: F.cross_entropy(x, x.argmax(1), **how),
        _X,
        {
            "label_smoothing": [0.0, 0.1, 0.5],
            "ignore_index": [-100, 0, 3],
            "reduction": _REDUCTION,
        },
    ),
    "max_pool2d": (
        F.max_pool2d,
        _IMAGE,
        {
            "kernel_size": [2, 3, (2, 3)],
            "stride": [2, 1, 3],
            "padding": [0, 1],
            "dilation": [1, 2],
            "ceil_mode": [False, True],
        },
    ),
    "avg_pool2d": (
        F.avg_pool2d,
        _IMAGE,
        {
            "kernel_size": [2, 3, (2, 3)],
            "stride": [2, 1, 3],
            "padding": [0, 1],
            "ceil_mode": [False, True],
            "count_include_pad": [True, False],
            "divisor_override": [None, 3, 5],
        },
    ),
    "avg_pool1d": (
        F.avg_pool1d,
        _ROW,
        {"kernel_size": [2, 3], "stride": [2, 1], "padding": [0, 1]},
    ),
    "max_pool1d": (
        F.max_pool1d,
        _ROW,
        {"kernel_size": [2, 3], "stride": [2, 1], "padding": [0, 1]},
    ),
    "adaptive_avg": (F.adaptive_avg_pool2d, _IMAGE, {"output_size": [1, 2, 3, (2, 4)]}),
    "adaptive_max": (F.adaptive_max_pool2d, _IMAGE, {"output_size": [1, 2, 3, (2, 4)]}),
    "interpolate": (
        F.interpolate,
        _IMAGE,
        {
            "scale_factor": [2.0, 1.5, 0.5],
            "mode": ["nearest", "bilinear", "bicubic", "area", "nearest-exact"],
        },
    ),
    "bilinear": (
        lambda x, **how: F.interpolate(x, mode="bilinear", **how),
        _IMAGE,
        {"size": [4, 5, 12], "align_corners": [False, True], "antialias": [False, True]},
    ),
    "pixel_shuffle": (F.pixel_shuffle, ((1, 36, 2, 2),), {"upscale_factor": [2, 3, 6]}),
    "conv1d": (
        F.conv1d,
        ((1, 4, 12), (4, 2, 3)),
        {"stride": [1, 2, 3], "padding": [0, 1, 2, "same"], "dilation": [1, 2], "groups": [2]},
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
    "conv3d": (F.conv3d, (*_IMAGE3, (2, 2, 2, 2, 2)), {"stride": [1, 2], "padding": [0, 1]}),
    "conv_transpose2d": (
        F.conv_transpose2d,
        ((1, 4, 4, 4), (4, 2, 3, 3)),
        {
            "stride": [2, 3],
            "padding": [0, 1],
            "output_padding": [0, 1],
            "dilation": [1, 2],
            "groups": [1, 2],
        },
    ),
    "fold": (
        F.fold,
        ((1, 8, 9),),
        {"output_size": [(4, 4)], "kernel_size": [2], "dilation": [1], "padding": [0]},
    ),
    "unfold2d": (F.unfold, _IMAGE, {"kernel_size": [2, 3], "stride": [1, 2], "padding": [0, 1]}),
    "embedding": (
        lambda w, **how: F.embedding(torch.arange(3), w, **how),
        _X,
        {"padding_idx": [None, 0, 2], "max_norm": [None], "scale_grad_by_freq": [False, True]},
    ),
    "attention": (
        F.scaled_dot_product_attention,
        ((1, 2, 4, 8),) * 3,
        {"is_causal": [False, True], "scale": [None, 0.5, 1.0], "dropout_p": [0.0, 0.1]},
    ),
    # matrices
    "addmm": (torch.addmm, ((4, 4), (4, 8), (8, 4)), {"beta": [1, 2, 0.5], "alpha": [1, 2, 0.5]}),
    "baddbmm": (
        torch.baddbmm,
        ((2, 4, 4), (2, 4, 8), (2, 8, 4)),
        {"beta": [1, 2, 0.5], "alpha": [1, 2, 0.5]},
    ),
    "addmv": (torch.addmv, ((4,), (4, 8), (8,)), {"beta": [1, 2], "alpha": [1, 2]}),
    "einsum": (
        lambda a, b, equation: torch.einsum(equation, a, b),
        ((4, 4), (4, 4)),
        {"equation": ["ij,jk->ik", "ij,kj->ik", "ij,ij->ij", "ij,ij->i", "ij,jk->ki"]},
    ),
    "tensordot": (torch.tensordot, ((4, 4), (4, 4)), {"dims": [1, 2, ((0,), (0,))]}),
    "cdist": (torch.cdist, _XX, {"p": [2.0, 1.0, 3.0]}),
    "cross": (torch.linalg.cross, ((3, 3), (3, 3)), {"dim": [-1, 0]}),
    # indices
    "gather": (
        lambda x, dim: torch.gather(x, dim, torch.zeros(2, 2, dtype=torch.int64) + 1),
        _X,
        {"dim": [0, 1]},
    ),
    "index_select": (
        lambda x, dim, which: torch.index_select(x, dim, torch.tensor(which)),
        _X,
        {"dim": [0, 1], "which": [[0, 1], [1, 0], [2], [0, 0, 3]]},
    ),
    "index_add": (
        lambda x, alpha: x.index_add(0, torch.tensor([0, 2]), x[:2], alpha=alpha),
        _X,
        {"alpha": [1, 2, -0.5]},
    ),
    "scatter": (
        lambda x, dim, value: x.scatter(dim, torch.tensor([[1, 2], [0, 3]]), value),
        _X,
        {"dim": [0, 1], "value": [0.0, 1.0, 2.5]},
    ),
    "scatter_reduce": (
        lambda x, **how: x.scatter_reduce(0, torch.zeros(4, 8, dtype=torch.int64), x, **how),
        _X,
        {"reduce": ["sum", "amax", "mean", "prod"], "include_self": [True, False]},
    ),
    "index_put": (
        lambda x, accumulate: x.index_put((torch.tensor([0, 0, 1]),), x[:3], accumulate),
        _X,
        {"accumulate": [True]},
    ),
    "bucketize": (
        lambda x, right: torch.bucketize(x, torch.tensor([0.1, 0.5, 0.9]), right=right),
        _X,
        {"right": [False, True]},
    ),
    # randomness: the key must tell them apart, whatever the numbers
    "bernoulli": (lambda x, p: torch.bernoulli(x * p), _X, {"p": [0.5, 0.1]}),
    "randint": (lambda x, high: x + torch.randint(high, (8,)), _X, {"high": [2, 5, 100]}),
    "rand_like": (lambda x, dtype: torch.rand_like(x, dtype=dtype), _X, {"dtype": _DTYPES[:2]}),
}
