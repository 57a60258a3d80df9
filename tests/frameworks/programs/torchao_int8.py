"""torchao: weights of eight bits, in tensor subclasses, for inference."""

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    use_cache=False,
)
model = LlamaForCausalLM(config).eval()
quantize_(model, Int8WeightOnlyConfig())
compiled = torch.compile(model)
with torch.no_grad():
    for tokens in torch.randint(3, 64, (2, 4, 16)):
        print("loss", compiled(input_ids=tokens, labels=tokens).loss.item().hex())
