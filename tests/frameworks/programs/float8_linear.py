"""torch: a linear layer with float8 weights and inputs, scaled by row."""

import torch

torch.manual_seed(0)
weight = torch.randn(32, 64) / 8


def quantized(x):
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / 448.0
    return (x / scale).to(torch.float8_e4m3fn), scale


@torch.compile
def linear(x):
    q, scale = quantized(x)
    w, by_row = quantized(weight)
    return (q.float() @ w.float().t()) * scale * by_row.t()


for x in torch.randn(3, 16, 64):
    print("loss", linear(x).sum().item().hex())
