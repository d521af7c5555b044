# SPDX-License-Identifier: Apache-2.0
"""Small models that tests share. Shapes: B batch, T sequence, D width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)  # its gradient would be pure rounding error
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (
            f(x_BTD).view(b, t, self.num_heads, d // self.num_heads).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class TinyGpt(nn.Module):
    """Two blocks, head tied to the embedding; sizes that 2, 3 and 4 ranks do not divide."""

    def __init__(
        self, vocab: int = 37, width: int = 24, num_heads: int = 4, num_blocks: int = 2, max_len: int = 10
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(ids_BT.shape[1])
        x_BTD = self.tokens(ids_BT) + self.positions(positions)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make_gpt(**sizes: int) -> TinyGpt:
    """The same weights on every rank, whatever its random state."""
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model = TinyGpt(**sizes)
    torch.set_rng_state(state)
    return model


def batch(step: int, num_rows: int, vocab: int = 37, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random batch on every rank: ids and targets (num_rows, length)."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab, (num_rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
