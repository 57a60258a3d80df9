"""transformers under torchrun: the Trainer wraps the model in DDP by itself."""

import torch
from small_llama import small_llama
from transformers import Trainer, TrainingArguments, set_seed

set_seed(0)
tokens = torch.randint(3, 64, (16, 16))
trainer = Trainer(
    model=small_llama(),
    args=TrainingArguments(
        output_dir="output",
        torch_compile=True,
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
print("loss", trainer.train().training_loss.hex())
torch.distributed.destroy_process_group()
