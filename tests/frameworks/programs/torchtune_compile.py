"""torchtune: its ``compile_model`` compiles its Llama layer by layer, as in its recipes."""

import torch
from torchtune.models.llama3 import llama3
from torchtune.training import compile_model

torch.manual_seed(0)
model = llama3(
    vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=32
)
compile_model(model, verbose=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for tokens in torch.randint(3, 64, (3, 4, 16)):
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
