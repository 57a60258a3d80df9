"""transformers: fine-tune an encoder for classification, and evaluate it."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


def rows(count, seed):
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 64, (count, 16), generator=chance)
    labels = torch.randint(0, 2, (count,), generator=chance)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(tokens, labels, strict=True)
    ]


set_seed(0)
config = BertConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="output",
        torch_compile=True,
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=rows(12, 1),
    eval_dataset=rows(8, 2),
)
print("loss", trainer.train().training_loss.hex())
print("loss", trainer.evaluate()["eval_loss"].hex())
