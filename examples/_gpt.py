"""A small character-level GPT, and a book to train it on. Nothing here uses s3cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CONTEXT", "GPT", "batches", "encoded_book"]

CONTEXT = 64
_BATCH = 16


def encoded_book() -> tuple[Tensor, int]:
    """Return the book as numbers of characters, and its number of different characters."""
    text = (Path(__file__).parent / "alice.txt").read_text(encoding="ascii")
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text]), len(number)


def batches(book: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random passages, and the same passages one character later, forever."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(book) - CONTEXT, (_BATCH, 1), generator=chance)
        at = starts + torch.arange(CONTEXT)
        yield book[at], book[at + 1]


class GPT(nn.Module):
    """A decoder-only transformer that returns the loss of predicting each next character."""

    def __init__(self, vocabulary: int, layers: int, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.token(text) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))
