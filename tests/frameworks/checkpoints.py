"""Check callbacks of ``flush_at_checkpoint`` in real trainers: ``-m tests.frameworks.checkpoints``.

Nothing is compiled: a trainer only has to call them when it saves a checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from s3cache import Cache
from s3cache.integrations import flush_at_checkpoint
from s3cache.tier import FlushReport


class _Watched:
    """A stand-in for a cache, which counts the checkpoints at each flush."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints: list[int] = []

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        self.checkpoints.append(sum(1 for _ in self.folder.rglob("*checkpoint*")))
        return FlushReport(0, 0, None)


def _transformers(folder: Path, callback: Any) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.linear(x) - labels).square().mean()}

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, report_to=[], use_cpu=True
    )
    rows = [{"x": torch.ones(4), "labels": torch.ones(1)}] * 8
    Trainer(model=Model(), args=arguments, train_dataset=rows, callbacks=[callback]).train()


def _lightning(package: str, folder: Path, callback: Any) -> None:
    lightning: Any = importlib.import_module(package)
    import torch

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.linear(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        callbacks=[callback],
    )
    rows: Any = torch.ones(4, 4)
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=2))


#: Functions that train for a few steps and save two checkpoints, by framework.
TRAINERS: dict[str, Callable[[Path, Any], None]] = {
    "transformers": _transformers,
    "lightning": partial(_lightning, "lightning"),
    "pytorch_lightning": partial(_lightning, "pytorch_lightning"),
}


def flushes(framework: str, folder: Path) -> list[int]:
    """Return the number of files and folders of checkpoints at each flush of a training."""
    watched = _Watched(folder)
    callback = flush_at_checkpoint(
        cast("Any", framework), timeout_s=5, cache=cast("Cache", watched)
    )
    TRAINERS[framework](folder, callback)
    return watched.checkpoints


if __name__ == "__main__":
    for name in TRAINERS:
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is not installed")
        with tempfile.TemporaryDirectory() as place:
            found = flushes(name, Path(place))
        print(f"{name}: flushed at {len(found)} checkpoints", flush=True)
        assert len(found) >= 2, found
