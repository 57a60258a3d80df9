"""Lightning starts the second rank itself: a process that nobody's launcher has seen."""

import sys

import lightning
import torch


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.inner, self.outer = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)

    def forward(self, x):
        return self.outer(torch.nn.functional.gelu(self.inner(x)))

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 64), torch.randn(16, 8))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Regression()
trainer.fit(torch.compile(module), torch.utils.data.DataLoader(data, batch_size=4))
lines = [f"loss {trainer.global_rank} {loss.item().hex()}\n" for loss in module.losses]
sys.stdout.write("".join(lines))  # at once: two ranks share it
