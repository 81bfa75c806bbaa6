"""Factors on queries and keys are looked for on copies, and what has none does not keep others from theirs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.rewrites import QKClip, make_plan
from normprobe.rewrites.qk.copies import on_copies
from tests.models import gpt2
from tests.rewrites.cases import snapshot
from tests.rewrites.test_qk_clip import largest


class Attention(nn.Module):
    """Four heads; a `free` one divides queries and keys by the norms of their weights, so that no factor moves it."""

    def __init__(self, free: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.free = free

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        if self.free:
            q, k = 5 * q / self.q.weight.norm(), 5 * k / self.k.weight.norm()
        heads = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (q, k, self.v(x)))
        found: Tensor = self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, free: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(free)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.attention(self.norm(x))
        return found


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [Block(free) for free in (False, True, False)]
    model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 64))
    return model.eval(), torch.randint(0, 64, (2, 8))


def test_an_attention_without_factors_is_refused_and_the_others_are_clipped() -> None:
    model, tokens = stack()
    plan = make_plan(model, [QKClip(limit=0.1)], tokens)
    ((_, found),) = plan.steps
    assert {site.path.rpartition(".")[0] for site in found.sites} == {"1.attention", "3.attention"}
    (refused,) = found.refused
    assert refused.path == "2.attention"
    assert refused.why.startswith("no factors were found in 11 rounds: head ")
    plan.apply()
    heads = largest(model, tokens)
    assert {path for (path, _), value in heads.items() if value > 0.1001} == {"2.attention"}


def test_a_graph_that_was_built_before_a_plan_still_goes_backward() -> None:
    model, inputs = gpt2()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    before = snapshot(model)
    assert make_plan(model, [QKClip(limit=0.05)], inputs).steps[0][1].sites
    assert snapshot(model) == before
    loss.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad is not None


def test_a_copy_stands_wherever_its_parameter_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weight, other = model[0].weight, model[2].weight
    with on_copies(model, ["1.weight", "0.weight"]):
        assert model[0].weight is model[1].weight
        assert model[0].weight is not weight
        assert torch.equal(model[0].weight, weight)
        assert model[2].weight is other
        with torch.no_grad():
            model[0].weight.zero_()
    assert model[0].weight is model[1].weight is weight
    assert bool(weight.detach().any())
