"""Two small transformers to measure: a vision transformer for 32 x 32 images and a causal language model.

Axes: N examples, T positions, D features. Learned positions have a batch axis, so that they belong to examples.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(n, t, d)))


class TransformerBlock(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and with a residual connection."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads, causal)
        self.norm2 = nn.LayerNorm(dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.narrow(F.gelu(self.wide(self.norm2(x)))))


class Transformer(nn.Module):
    """An embedding, blocks, and a classifier."""

    def __init__(
        self, embed: nn.Module, positions: int, dim: int, depth: int, heads: int, classes: int, causal: bool
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Embedding(positions, dim)
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads, causal) for _ in range(depth)))
        self.norm, self.head, self.causal = nn.LayerNorm(dim), nn.Linear(dim, classes), causal

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, T, classes] of a causal model, else [N, classes], from the mean over positions."""
        tokens = self.embed(x)
        n, t = tokens.shape[:2]
        features = self.norm(self.blocks(tokens + self.positions(torch.arange(t, device=x.device).expand(n, t))))
        return cast(Tensor, self.head(features if self.causal else features.mean(dim=1)))


class Patches(nn.Module):
    """An image as a row of patches [N, T, D]."""

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, dim, side, stride=side)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.cut(images).flatten(2).transpose(1, 2))


def vit_tiny() -> Transformer:
    return Transformer(Patches(192, 4), positions=64, dim=192, depth=12, heads=3, classes=10, causal=False)


def gpt(depth: int = 6, length: int = 256) -> Transformer:
    return Transformer(
        nn.Embedding(256, 384), positions=length, dim=384, depth=depth, heads=6, classes=256, causal=True
    )
