"""Lightning: fit and validate a compiled module."""

import lightning
import torch
from small_lightning import QUIET, Regression, rows


class Validated(Regression):
    def validation_step(self, batch, index):
        x, y = batch
        self.losses.append(torch.nn.functional.mse_loss(self(x), y))


batches = rows(12)
trainer = lightning.Trainer(num_sanity_val_steps=0, **QUIET)
module = Validated()
trainer.fit(torch.compile(module), batches, batches)
for loss in module.losses:
    print("loss", loss.item().hex())
