"""peft: LoRA adapters on a Llama with a frozen base model."""

import torch
from peft import LoraConfig, get_peft_model
from small_llama import small_llama

torch.manual_seed(0)
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
model = get_peft_model(small_llama(), lora)
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
compiled = torch.compile(model)
for tokens in torch.randint(3, 64, (3, 4, 16)):
    loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
