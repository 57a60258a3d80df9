"""transformers: train, evaluate, save a checkpoint, and resume from it."""

import torch
from small_llama import small_llama
from transformers import Trainer, TrainingArguments, set_seed


def rows(count, seed):
    tokens = torch.randint(3, 64, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(steps):
    set_seed(0)
    arguments = TrainingArguments(
        output_dir="output",
        torch_compile=True,
        max_steps=steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(
        model=small_llama(num_key_value_heads=2),
        args=arguments,
        train_dataset=rows(16, 1),
        eval_dataset=rows(8, 2),
    )


first = trainer(2)
print("loss", first.train().training_loss.hex())
print("loss", first.evaluate()["eval_loss"].hex())
resumed = trainer(4)
print("loss", resumed.train(resume_from_checkpoint=True).training_loss.hex())
print("loss", resumed.evaluate()["eval_loss"].hex())
