"""Small models of the ``transformers`` package with random weights, and one training step each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.watch import Watch

__all__ = ["MODELS", "run"]


def run(names: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Take a training step with each model, eager and compiled.

    Args:
        folder: where results are kept; those that another machine kept there are compared with.

    Returns:
        For each model what :class:`Watch` counts, ``loss``, ``error`` (the largest difference to
        eager's loss and gradients, relative to the largest gradient), and ``equal`` (to what was
        kept; ``None`` if nothing was).
    """
    watch = Watch()
    return {name: watch.around(partial(_trained, name, folder)) for name in names}


def _trained(name: str, folder: str) -> dict[str, Any]:
    import torch

    torch.compiler.reset()
    expected = _step(MODELS[name], lambda model: model)
    result = _step(MODELS[name], torch.compile)
    kept = Path(folder, f"{name}.pt")
    equal = _equal(torch.load(kept), result) if kept.exists() else None
    if equal is None:
        torch.save(result, kept)
    return {"loss": float(result[0]), "error": _error(expected, result), "equal": equal}


def _step(make: Callable[[], tuple[Any, dict[str, Any]]], compile_it: Any) -> list[Any]:
    """Loss and gradients, in the order of the parameters."""
    import torch

    torch.manual_seed(0)
    model, inputs = make()
    loss = compile_it(model)(**inputs).loss
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return [loss.detach(), *(each for each in gradients if each is not None)]


def _error(expected: list[Any], found: list[Any]) -> float:
    assert len(expected) == len(found)
    scale = max(float(each.abs().max()) for each in expected)
    pairs = zip(expected, found, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def _equal(expected: list[Any], found: list[Any]) -> bool:
    import torch

    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def _tokens(vocabulary: int) -> Any:
    import torch

    return torch.randint(3, vocabulary, (2, 8))


def _llama() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        use_cache=False,
    )
    tokens = _tokens(32)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def _bert() -> tuple[Any, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = _tokens(32)
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def _vit() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    make_config: Any = ViTConfig  # it takes more than it declares
    config = make_config(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    images = torch.rand(2, 3, 8, 8)
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([1, 3]),
    }


def _t5() -> tuple[Any, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    make_config: Any = T5Config
    config = make_config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(32), "labels": _tokens(32)}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
}
