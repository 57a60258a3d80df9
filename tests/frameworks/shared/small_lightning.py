"""A small Lightning module, and options for a quiet trainer."""

import lightning
import torch

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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


def rows(count):
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(count, 64), torch.randn(count, 8))
    return torch.utils.data.DataLoader(data, batch_size=4)
