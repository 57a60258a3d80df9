"""transformers: ``generate`` with a static cache compiles the decoding itself."""

import torch
from small_llama import small_llama
from transformers import CompileConfig

torch.manual_seed(0)
changes = {"use_cache": True, "pad_token_id": 0, "eos_token_id": None}
model = small_llama(max_position_embeddings=64, **changes).eval()
compile_config = CompileConfig(fullgraph=True)
compile_config._compile_all_devices = True  # otherwise it compiles on accelerators only
tokens = model.generate(
    torch.randint(3, 64, (2, 8)),
    max_new_tokens=6,
    do_sample=False,
    cache_implementation="static",
    compile_config=compile_config,
    output_logits=True,
    return_dict_in_generate=True,
)
print("loss", tokens.sequences.tolist())
print("loss", torch.stack(tokens.logits).square().mean().item().hex())
