"""torch: flex attention with a causal mask and a custom score."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch.manual_seed(0)


def causal(b, h, q, k):
    return q >= k


def distance(score, b, h, q, k):
    return score - 0.1 * (q - k)


mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
attend = torch.compile(flex_attention)
with torch.no_grad():
    for q, k, v in torch.randn(2, 3, 1, 2, 128, 16):
        out = attend(q, k, v, score_mod=distance, block_mask=mask)
        print("loss", out.square().mean().item().hex())
