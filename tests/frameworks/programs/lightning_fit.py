"""Lightning: fit and validate a module that was compiled before."""

import lightning
import torch


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
        )

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.network(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.losses.append(torch.nn.functional.mse_loss(self.network(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(12, 64), torch.randn(12, 8))
batches = torch.utils.data.DataLoader(data, batch_size=4)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
module = Regression()
trainer.fit(torch.compile(module), batches, batches)
for loss in module.losses:
    print("loss", loss.item().hex())
