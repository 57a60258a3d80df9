"""Lightning starts the second rank itself, without a launcher."""

import sys

import lightning
import torch
from small_lightning import QUIET, Regression, rows

batches = rows(16)
trainer = lightning.Trainer(devices=2, strategy="ddp", **QUIET)
module = Regression()
trainer.fit(torch.compile(module), batches)
lines = [f"loss {trainer.global_rank} {loss.item().hex()}\n" for loss in module.losses]
sys.stdout.write("".join(lines))  # in one call, because two ranks share stdout
