"""torchao: inference with 8-bit weights in tensor subclasses."""

import torch
from small_llama import small_llama
from torchao.quantization import Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)
model = small_llama().eval()
quantize_(model, Int8WeightOnlyConfig())
compiled = torch.compile(model)
with torch.no_grad():
    for tokens in torch.randint(3, 64, (2, 4, 16)):
        print("loss", compiled(input_ids=tokens, labels=tokens).loss.item().hex())
