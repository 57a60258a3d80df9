"""Programs as users of a framework write them, without any code for s3cache."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "programs"
SHARED = Path(__file__).parent / "shared"  # modules that several programs import


@dataclass(frozen=True)
class Program:
    """A program of ``programs/``.

    Attributes:
        framework: the name of the package, as in the extra ``frameworks``.
        does: a description of the program, for the page.
        ranks: the number of processes under torchrun; 1 runs without torchrun.
        beside: a folder of the environment with versions of packages for this program only.
        kills: whether the framework kills its processes, which then count while they run.
    """

    framework: str
    does: str
    ranks: int = 1
    beside: str = ""
    kills: bool = False

    @property
    def path(self) -> str:
        """An additional entry for its processes' path, or an empty string."""
        return os.path.join(sys.prefix, self.beside) if self.beside else ""


PROGRAMS: dict[str, Program] = {
    "compiled_optimizer": Program("torch", "a compiled optimizer step"),
    "flex_attention": Program("torch", "flex attention with a mask and a score"),
    "ddp": Program("torch", "DDP, three buckets", ranks=2),
    "fsdp2": Program("torch", "FSDP2, `fully_shard` per block", ranks=2),
    "tensor_parallel": Program("torch", "tensor parallelism, `parallelize_module`", ranks=2),
    "dataloader_workers": Program("torch", "`DataLoader` workers: forked, spawned, persistent"),
    "per_sample_gradients": Program(
        "torch", "per-sample gradients, and an ensemble (`torch.func`)"
    ),
    "jagged_attention": Program("torch", "attention over jagged tensors"),
    "float8_linear": Program("torch", "a linear layer in float8, scaled by row"),
    "hf_trainer_llama": Program(
        "transformers", "`Trainer(torch_compile=True)`: Llama, evaluate, checkpoint, resume"
    ),
    "hf_trainer_ddp": Program("transformers", "the same `Trainer` on two ranks", ranks=2),
    "generate_static_cache": Program("transformers", "`generate` with a static cache"),
    "accelerate_regional": Program(
        "accelerate", "`TorchDynamoPlugin` with `use_regional_compilation`"
    ),
    "lightning_fit": Program("lightning", "`Trainer.fit` of a compiled module, and validation"),
    "lightning_ddp": Program(
        "lightning", '`strategy="ddp"`, two ranks, one of which it starts itself'
    ),
    "peft_lora": Program("peft", "LoRA on a Llama"),
    "timm_train": Program("timm", "a ViT and a ConvNeXt, its losses, optimizers, schedules"),
    "torchao_int8": Program("torchao", "int8 weight-only, inference"),
    "diffusers_blocks": Program("diffusers", "`compile_repeated_blocks` of a Flux transformer"),
    "kornia_augment": Program("kornia", "16 filters and transforms, and a pipeline"),
    "ray_train": Program("ray", "Ray Train, two workers with DDP", kills=True),
    "notebook_kernel": Program("ipykernel", "a notebook; its kernel is restarted"),
    "hydra_joblib": Program(
        "hydra-core", "a sweep, side by side in joblib's processes", beside="hydra"
    ),
    "torchtune_compile": Program("torchtune", "`compile_model`: a Llama", beside="torchtune"),
}
