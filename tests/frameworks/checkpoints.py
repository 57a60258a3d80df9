"""Check callbacks of ``flush_at_checkpoint`` in real trainers: ``-m tests.frameworks.checkpoints``.

Nothing is compiled: a trainer only has to call them when it saves a checkpoint.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import torch

from s3cache.integrations import flush_at_checkpoint
from s3cache.tier import FlushReport


def _transformers(folder: Path, callback: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, report_to=[], use_cpu=True
    )
    rows: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    model = importlib.import_module("small_llama").small_llama()
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()


def _lightning(package: str, folder: Path, callback: Any) -> None:
    lightning: Any = importlib.import_module(package)

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.linear(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=2, default_root_dir=folder, callbacks=[callback], **quiet
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
    cache: Any = Mock()
    checkpoints: list[int] = []

    def flush(timeout_s: float | None = None) -> FlushReport:
        checkpoints.append(sum(1 for _ in folder.rglob("*checkpoint*")))
        return FlushReport(0, 0, None)

    cache.flush = flush
    callback = flush_at_checkpoint(cast("Any", framework), timeout_s=5, cache=cache)
    TRAINERS[framework](folder, callback)
    return checkpoints


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).with_name("shared")))
    for name in TRAINERS:
        with tempfile.TemporaryDirectory() as place:
            found = flushes(name, Path(place))
        print(f"{name}: flushed at {len(found)} checkpoints", flush=True)
        assert len(found) >= 2, found
