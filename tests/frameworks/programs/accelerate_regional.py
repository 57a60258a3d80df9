"""accelerate: the blocks of a transformer compiled one by one, which are the same graph."""

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, set_seed
from small_llama import small_llama

set_seed(0)
plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
model = small_llama()
model, optimizer, batches = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    torch.utils.data.DataLoader(torch.randint(3, 64, (12, 16)), batch_size=4),
)
for tokens in batches:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
