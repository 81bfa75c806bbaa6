"""Logits to which a position bias is added: what the bias makes large is no growth of q·k, if the sum is resolved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe import Report
from normprobe.records import AttentionMeasure, Finding

WIDTH, HEADS, TOKENS = 32, 4, 160
HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def added(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5 + bias


def in_one(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    scale = q.shape[-1] ** -0.5
    summed = torch.baddbmm(bias.expand(HEADS, 1, TOKENS), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return summed.unflatten(0, (1, HEADS))


def by_kernel(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    mask = bias.expand(1, HEADS, TOKENS, TOKENS).masked_fill(HIDDEN, -torch.inf)
    return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def wide(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).float() * q.shape[-1] ** -0.5 + bias.float()


class Sloped(nn.Module):
    """A pre-norm block whose logits grow with the place of the key, as ALiBi's do, up to 0.7 · tokens."""

    def __init__(self, logits: Callable[[Tensor, Tensor, Tensor], Tensor], loud: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = logits
        self.norm, self.q, self.k, self.o = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.q.weight.data.mul_(loud)
        self.register_buffer("slopes", torch.tensor([0.7, 0.35, 0.1, 0.03])[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k))
        bias = self.slopes * torch.arange(TOKENS, dtype=x.dtype)
        made = self.logits(bias, q, k)
        if self.logits is not by_kernel:
            made = made.masked_fill(HIDDEN, -torch.inf).float().softmax(-1).to(k.dtype) @ k
        branch: Tensor = self.o(made.transpose(1, 2).flatten(2))
        return x + branch


def report_of(model: nn.Module, dtype: torch.dtype) -> Report:
    return normprobe.probe(model.to(dtype), torch.randn(1, TOKENS, WIDTH, generator=torch.manual_seed(1)).to(dtype))


def found(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.code == "NP401"]


def measure(report: Report) -> AttentionMeasure:
    (site,) = report.measurements.attention
    return site


@pytest.mark.parametrize("logits", [added, in_one, by_kernel])
def test_a_bias_in_float32_is_no_growth(logits: Callable[..., Tensor]) -> None:
    report = report_of(Sloped(logits), torch.float32)
    site = measure(report)
    assert max(head.sampled_max for head in site.heads) > 100
    assert max(head.uncapped_max or 1e9 for head in site.heads) < 5
    assert (found(report), site.grid) == ([], "float32")


@pytest.mark.parametrize("logits", [added, in_one, by_kernel])
def test_large_products_beside_a_bias_are_found(logits: Callable[..., Tensor]) -> None:
    (finding,) = found(report_of(Sloped(logits, loud=300.0), torch.float32))
    assert finding.message.startswith("logits without their position bias reach ")


@pytest.mark.parametrize("logits", [added, in_one])
def test_a_sum_that_bfloat16_rounds_is_found_though_the_softmax_is_in_float32(logits: Callable[..., Tensor]) -> None:
    report = report_of(Sloped(logits), torch.bfloat16)
    (finding,) = found(report)
    assert "with their position bias reach 11" in finding.message
    assert "where neighbouring bfloat16 numbers are 0.5 apart" in finding.message
    assert (measure(report).grid, measure(report).basis.dtype) == ("bfloat16", "float32")


def test_a_sum_in_float32_of_a_product_in_bfloat16_is_resolved() -> None:
    report = report_of(Sloped(wide), torch.bfloat16)
    assert (found(report), measure(report).grid) == ([], "float32")
