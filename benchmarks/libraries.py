"""Check that programs with popular libraries hit on a second machine, and time their keys.

    python -m benchmarks.libraries [--only NAME ...] [--path DIRECTORY] [--json FILE]

Each program imports a library, compiles a one-line function and then a model or function of the
library, on a first machine and on a second one with an empty disk. The second machine must not
miss. Libraries that are not installed are left out, and named. ``--path`` comes first in
``PYTHONPATH``: with a directory that holds only Triton, the same programs run with Triton.

The cost of a key is CPU time of the compiling thread, for the checks and the key of one graph.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from s3cache.testing import Machine, ProgramError

KEY_BAR_S = 0.1  # CPU seconds for the key of a graph
# Functions that hooks/_keys.py calls for the checks and the key of one graph.
_TIMED = ("bypass_reasons", "fx_bypass_reasons", "key_of")


def _tensordict() -> tuple[Any, ...]:
    import torch
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    module = TensorDictModule(torch.nn.Linear(4, 3), in_keys=["a"], out_keys=["b"])
    return lambda data: module(data)["b"], TensorDict({"a": torch.ones(2, 4)}, [2])


def _torchrl() -> tuple[Any, ...]:
    import torch
    from torchrl.modules import MLP

    return MLP(in_features=4, out_features=2, num_cells=[8]), torch.ones(3, 4)


def _torch_geometric() -> tuple[Any, ...]:
    import torch
    from torch_geometric.nn import GCNConv

    return GCNConv(4, 2), torch.ones(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])


def _torchao(config: str) -> tuple[Any, ...]:
    import torch
    import torchao.quantization as quantization

    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantization.quantize_(model, getattr(quantization, config)())
    return model.requires_grad_(False), torch.ones(8, 64)


def _torchao_dynamic() -> tuple[Any, ...]:
    return _torchao("Int8DynamicActivationInt8WeightConfig")


def _torchao_weight_only() -> tuple[Any, ...]:
    return _torchao("Int8WeightOnlyConfig")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaModel(LlamaConfig(vocab_size=50, num_attention_heads=2, use_cache=False, **sizes))


def _transformers() -> tuple[Any, ...]:
    import torch

    model = _llama()
    return lambda tokens: model(tokens)[0], torch.arange(12).reshape(2, 6)


def _accelerate() -> tuple[Any, ...]:
    import torch
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(torch.nn.Linear(4, 2)), torch.ones(3, 4)


def _peft() -> tuple[Any, ...]:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_llama(), LoraConfig(target_modules=["q_proj"], r=2))
    return lambda tokens: model(tokens)[0], torch.arange(12).reshape(2, 6)


def _timm() -> tuple[Any, ...]:
    import timm
    import torch

    return timm.create_model("test_vit", num_classes=3).eval(), torch.ones(1, 3, 160, 160)


def _lightning() -> tuple[Any, ...]:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x))

    return Model(), torch.ones(3, 4)


def _diffusers() -> tuple[Any, ...]:
    import torch
    from diffusers.models.attention import BasicTransformerBlock

    return BasicTransformerBlock(16, 2, 8), torch.ones(1, 4, 16)


def _einops() -> tuple[Any, ...]:
    import torch
    from einops import rearrange

    return lambda x: rearrange(x, "a b c -> (a b) c").sin(), torch.ones(2, 3, 4)


def _liger_kernel() -> tuple[Any, ...]:
    import liger_kernel.ops
    import torch

    assert liger_kernel.ops
    return torch.nn.Linear(4, 2), torch.ones(3, 4)  # its kernels need a GPU


def _xformers() -> tuple[Any, ...]:
    import torch
    import xformers.ops

    return xformers.ops.SwiGLU(8, 16), torch.ones(3, 8)


def _x_transformers() -> tuple[Any, ...]:
    import torch
    from x_transformers import Encoder

    return Encoder(dim=16, depth=1, heads=2, attn_dim_head=8), torch.ones(1, 4, 16)


def _monai() -> tuple[Any, ...]:
    import torch
    from monai.networks.nets import FullyConnectedNet

    return FullyConnectedNet(4, 2, [8]), torch.ones(3, 4)


def _keras() -> tuple[Any, ...]:
    import keras
    import torch

    return keras.layers.Dense(2), torch.ones(3, 4)


# The module that a program needs, and a function that returns a callable and its arguments.
PROGRAMS: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "tensordict": ("tensordict", _tensordict),
    "torchrl": ("torchrl", _torchrl),
    "torch_geometric": ("torch_geometric", _torch_geometric),
    "torchao, int8 dynamic": ("torchao", _torchao_dynamic),
    "torchao, int8 weight only": ("torchao", _torchao_weight_only),
    "transformers": ("transformers", _transformers),
    "accelerate": ("accelerate", _accelerate),
    "peft": ("peft", _peft),
    "timm": ("timm", _timm),
    "lightning": ("lightning", _lightning),
    "diffusers": ("diffusers", _diffusers),
    "einops": ("einops", _einops),
    "liger-kernel": ("liger_kernel", _liger_kernel),
    "xformers": ("xformers", _xformers),
    "x-transformers": ("x_transformers", _x_transformers),
    "monai": ("monai", _monai),
    "keras": ("keras", _keras),
}


def run_program(name: str, url: str) -> dict[str, Any]:
    """Run a program in this process with s3cache on; return the CPU seconds of each key."""
    import torch

    import s3cache

    session = s3cache.enable(url)
    costs = _time_keys()
    compiled = torch.compile(lambda x: x * 2 + 1)
    compiled(torch.ones(3))
    torch.manual_seed(0)
    function, *inputs = PROGRAMS[name][1]()
    output = torch.compile(function)(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    if output.requires_grad:
        output.sum().backward()
    session.flush()
    return {"costs": costs}


def _time_keys() -> list[float]:
    """Return a list that gets the CPU seconds of each later check and key."""
    keys = vars(importlib.import_module("s3cache.hooks._keys"))
    costs: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                costs.append(time.thread_time() - began)

        return call

    for name in _TIMED:
        keys[name] = timed(keys[name])
    return costs


def measure(name: str, path: str) -> dict[str, Any]:
    """Run a program on two machines; return its row."""
    with tempfile.TemporaryDirectory() as root:
        url = f"file://{root}/remote?create=1"
        row: dict[str, Any] = {"name": name}
        for number, which in enumerate(("cold", "warm")):
            variables = {"KERAS_BACKEND": "torch", "PYTHONWARNINGS": "ignore"}
            machine = Machine(f"{root}/{which}", **variables, PYTHONPATH=path)
            began = time.monotonic()
            found = machine.call("benchmarks.libraries:run_program", name, url, timeout_s=900)
            row[f"{which}_s"] = time.monotonic() - began
            if number:
                row["stats"] = found.stats.in_numbers()
            row[f"{which}_key_s"] = max(found.result["costs"], default=0.0)
        return row


def main() -> int:
    """Measure the programs and print a table; return 1 if one fails, misses or has a slow key."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--path", default="", help="a directory to put first in PYTHONPATH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = os.pathsep.join(filter(None, [options.path, os.environ.get("PYTHONPATH", "")]))
    sys.path[:0] = [options.path] if options.path else []
    rows, bad = [], False
    for name in options.only:
        if find_spec(PROGRAMS[name][0]) is None:
            print(f"{name:<26} not installed", flush=True)
            continue
        try:
            row = measure(name, path)
        except ProgramError as exc:
            bad = True
            print(f"{name:<26} FAILED: {str(exc).strip().splitlines()[-1]}", flush=True)
            continue
        rows.append(row)
        stats = row["stats"]
        slowest = max(row["cold_key_s"], row["warm_key_s"])
        hits, fx_hits, misses = (
            sum(counts.values())
            for counts in (stats["hits"], stats["second_level"]["hits"], stats["misses"])
        )
        bad |= bool(misses) or slowest > KEY_BAR_S
        print(
            f"{name:<26} hits {hits:>2}, FX hits {fx_hits:>2}, misses {misses:>2}, "
            f"bypassed {stats['bypassed']:>2}, "
            f"slowest key {slowest:.3f} CPU s, {row['cold_s']:.1f} -> {row['warm_s']:.1f} s",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
