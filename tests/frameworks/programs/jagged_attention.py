"""torch: jagged sequences are projected, padded for attention on a CPU, and normalized."""

import torch
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
project, norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)


@torch.compile
def attend(x, mask):
    hidden = norm(torch.nn.functional.gelu(project(x)))
    padded = torch.nested.to_padded_tensor(hidden, 0.0, output_size=(3, 9, 32))
    return scaled_dot_product_attention(padded, padded, padded, attn_mask=mask)


for lengths in ((5, 3, 7), (2, 9, 4)):
    rows = [torch.randn(length, 32) for length in lengths]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None, None]
    out = attend(x, mask)
    out.square().mean().backward()
    print("loss", out.sum().item().hex())
    print("loss", project.weight.grad.square().sum().item().hex())
