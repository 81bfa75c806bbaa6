"""A deep post-norm stack that plain training does not start, and a task that one matrix would solve."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.rewrites import Initialise, ScaleResidual, make_plan

BLOCKS, WIDTH, VOCABULARY, TOKENS = 48, 32, 16, 12
RATES, SEEDS, STEPS = (5e-4, 1e-3, 2e-3), (0, 1, 2), 50
LEARNED = math.log(VOCABULARY) / 2  # half the loss of a model that knows nothing


class Stack(nn.Module):
    """Embeddings, `BLOCKS` post-norm encoder layers as torch has them, and a head; Xavier's initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and for each the token that a fixed permutation gives: (16, TOKENS) both."""
    ids = torch.randint(0, VOCABULARY, (16, TOKENS), generator=generator)
    return ids, (5 * ids + 3) % VOCABULARY


def last_loss(rate: float, seed: int, *, rewritten: bool, warmup: int = 0, steps: int = STEPS) -> float:
    """Mean cross-entropy of the last ten steps of Adam."""
    torch.manual_seed(seed)
    model, generator = Stack(), torch.Generator().manual_seed(seed)
    if rewritten:
        make_plan(model, [ScaleResidual("deepnorm"), Initialise("deepnorm", seed=seed)], batch(generator)[0]).apply()
    optimiser: Any = torch.optim.Adam(model.train().parameters(), lr=rate, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / warmup) if warmup else rate
        ids, wanted = batch(generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10
