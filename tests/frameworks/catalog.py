"""The programs: each as a user of a framework would write it, with nothing of s3cache in it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "programs"
SHARED = Path(__file__).parent / "shared"  # modules that several of them import


@dataclass(frozen=True)
class Program:
    """A program of ``programs/``.

    Attributes:
        framework: the package it is about, as in the extra ``frameworks``.
        does: what the program does, for the page.
        ranks: processes under torchrun; with 1 without it.
        beside: a folder of the environment with packages of versions that the others cannot have.
    """

    framework: str
    does: str
    ranks: int = 1
    beside: str = ""

    @property
    def path(self) -> str:
        """What its processes need on their path; empty for nothing."""
        return os.path.join(sys.prefix, self.beside) if self.beside else ""


PROGRAMS: dict[str, Program] = {
    "compiled_optimizer": Program("torch", "a compiled optimizer step"),
    "flex_attention": Program("torch", "flex attention with a mask and a score"),
    "ddp": Program("torch", "DDP, three buckets", ranks=2),
    "fsdp2": Program("torch", "FSDP2, `fully_shard` per block", ranks=2),
    "tensor_parallel": Program("torch", "tensor parallelism, `parallelize_module`", ranks=2),
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
    "torchtune_compile": Program("torchtune", "`compile_model`: a Llama", beside="torchtune"),
}
