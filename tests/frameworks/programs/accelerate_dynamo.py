"""accelerate: a training loop whose model the dynamo plugin compiles as a whole."""

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, set_seed

set_seed(0)
accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="inductor"))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
data = torch.utils.data.TensorDataset(torch.randn(12, 64), torch.randn(12, 8))
model, optimizer, batches = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    torch.utils.data.DataLoader(data, batch_size=4),
)
for x, y in batches:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
