"""diffusers: the repeated blocks of a diffusion transformer, compiled in place."""

import torch
from diffusers import FluxTransformer2DModel

torch.manual_seed(0)
model = FluxTransformer2DModel(
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    axes_dims_rope=(4, 4, 8),
).eval()
model.compile_repeated_blocks(fullgraph=True)
with torch.no_grad():
    for step in (1.0, 0.5):
        out = model(
            hidden_states=torch.randn(1, 16, 16),
            encoder_hidden_states=torch.randn(1, 8, 32),
            pooled_projections=torch.randn(1, 32),
            timestep=torch.tensor([step]),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
        ).sample
        print("loss", out.square().mean().item().hex())
