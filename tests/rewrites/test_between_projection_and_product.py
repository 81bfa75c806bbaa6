"""Norms on queries and keys, and clipped weights, where something stands between the projection and q·k."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.errors import RewriteError
from normprobe.rewrites import AddQKNorm, QKClip, Rewrite, make_plan
from tests.models import WIDTH, shuffled

Bend = Callable[[Tensor], Tensor]
HEADS = 4
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention whose queries and keys are what `bend` makes of two projections."""

    def __init__(self, bend: Bend) -> None:
        super().__init__()
        self.bend = bend
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in (self.bend(self.q(x)), self.bend(self.k(x)), self.v(x).relu())
        )
        found: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return found


class Block(nn.Module):
    def __init__(self, bend: Bend) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(bend)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.attn(self.norm(x))
        return found


def model(bend: Bend) -> nn.Module:
    torch.manual_seed(0)
    return shuffled(nn.Sequential(*(Block(bend) for _ in range(2)), nn.LayerNorm(WIDTH))).eval()


def rotated(y: Tensor) -> Tensor:
    angle = torch.arange(y.shape[1])[:, None] / 10 ** torch.arange(WIDTH // 2)
    cos, sin = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))
    one, two = y.chunk(2, -1)
    return y * cos + torch.cat((-two, one), -1) * sin


BENDS: dict[str, Bend] = {
    "shift": lambda y: y + 0.5,
    "clamp": lambda y: y.clamp(-99, 99),
    "relu": torch.relu,
    "elu + 1": lambda y: F.elu(y) + 1,
    "tanh": torch.tanh,
}
STRAIGHT: dict[str, Bend] = {"nothing": lambda y: y, "factor": lambda y: y * 2, "rotary": rotated}


@pytest.mark.parametrize("rewrite", [AddQKNorm(), QKClip(limit=0.01)], ids=lambda each: each.name)
@pytest.mark.parametrize("name", BENDS)
def test_what_bends_queries_and_keys_is_refused(name: str, rewrite: Rewrite) -> None:
    why = r"in 0.attn stands between a projection and q·k|which rows of which weights? make its queries"
    with pytest.raises(RewriteError, match=why):
        make_plan(model(BENDS[name]), [rewrite], X).apply()


@pytest.mark.parametrize("name", STRAIGHT)
def test_reshapes_factors_and_rotary_embeddings_are_passed_and_the_bound_is_true(name: str) -> None:
    net = model(STRAIGHT[name])
    plan = make_plan(net, [AddQKNorm()], X).apply()
    bounds = [float(line.split("|logit| <= ")[1].split(",")[0]) for line in str(plan).splitlines() if "<= " in line][:2]
    for site, bound in zip(normprobe.probe(net, X, exact=True).attention, bounds, strict=True):
        assert max(head.sampled_max for head in site.heads) <= bound * 1.001
    plan.undo()
    assert make_plan(net, [QKClip(limit=0.01)], X).steps[0][1].sites
