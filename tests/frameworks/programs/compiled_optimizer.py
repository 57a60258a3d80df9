"""torch: a compiled optimizer step; the learning rate is a tensor that changes."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)


@torch.compile(fullgraph=False)
def step():
    optimizer.step()
    scheduler.step()


for x in torch.randn(3, 4, 64):
    loss = model(x).square().mean()
    loss.backward()
    step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
