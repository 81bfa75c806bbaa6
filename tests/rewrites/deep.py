"""A deep post-norm stack that plain training does not start, and a task that one matrix would solve."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.rewrites import Initialise, ScaleResidual, ToPostNorm, make_plan

BLOCKS, WIDTH, VOCABULARY, TOKENS = 48, 32, 16, 12
RATES, SEEDS, STEPS = (5e-4, 1e-3, 2e-3), (0, 1, 2), 50
GRID = [(rate, seed) for rate in RATES for seed in SEEDS]
LEARNED = math.log(VOCABULARY) / 2  # half the loss of a model that knows nothing
Made = Literal["post", "pre", "deepnorm", "pre to deepnorm"]


class Stack(nn.Module):
    """Embeddings, encoder layers as torch has them, and a head; Xavier's initialisation.

    Post-norm, or pre-norm with a final norm.
    """

    def __init__(self, pre: bool = False, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        more = {"batch_first": True, "norm_first": pre}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, **more) for _ in range(blocks))
        self.final = nn.LayerNorm(WIDTH) if pre else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final(x))
        return logits


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and for each the token that a fixed permutation gives: (16, TOKENS) both."""
    ids = torch.randint(0, VOCABULARY, (16, TOKENS), generator=generator)
    return ids, (5 * ids + 3) % VOCABULARY


@cache
def made(how: Made, seed: int, blocks: int) -> Stack:
    """The stack as it is, or with DeepNorm's α and weights put on it; to be copied before it is trained."""
    ids, _ = batch(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    model = Stack(how.startswith("pre"), blocks)
    if how == "pre to deepnorm":
        make_plan(model, [ToPostNorm(deepnorm=True)], ids).apply()
        make_plan(model, [Initialise("deepnorm", seed=seed)], ids).apply()
    elif how == "deepnorm":
        make_plan(model, [ScaleResidual("deepnorm"), Initialise("deepnorm", seed=seed)], ids).apply()
    return model.train()


@dataclass(frozen=True)
class Trained:
    """One training.

    Attributes:
        loss: mean cross-entropy of the last ten steps.
        top: the share of the first gradient's squared length, over all blocks, that the upper quarter of them has.
    """

    loss: float
    top: float

    @property
    def learned(self) -> bool:
        """Whether the loss is below half of what a model has that knows nothing."""
        return self.loss < LEARNED


def train(how: Made, rate: float, seed: int, *, warmup: int = 0, steps: int = STEPS, blocks: int = BLOCKS) -> Trained:
    """Train by Adam, the rate growing from 0 over the first `warmup` steps."""
    generator = torch.Generator().manual_seed(seed)
    batch(generator)  # the rewrites had the first
    model = copy.deepcopy(made(how, seed, blocks))
    optimiser: Any = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    losses, top = [], 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / warmup) if warmup else rate
        ids, wanted = batch(generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        top = _top(model) if step == 0 else top
        optimiser.step()
        losses.append(loss.item())
    return Trained(sum(losses[-10:]) / 10, top)


def _top(model: Stack) -> float:
    squares = [sum(float(p.grad.square().sum()) for p in block.parameters()) for block in model.blocks]
    return sum(squares[-(len(squares) // 4) :]) / sum(squares)
