"""Weights of attention that come from no plain softmax: written out, mixed between heads, or another activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normprobe
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, HEADS = 8, 2
Weigh = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix, self.normed, self.weigh = nn.Conv2d(HEADS, HEADS, 1), nn.LayerNorm(HEADS), weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        weights = self.weigh(self, q @ k.transpose(-1, -2) / 2)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def mixed_and_normed(block: nn.Module, logits: Tensor) -> Tensor:
    return block.normed(block.mix(logits.softmax(-1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore


def off_by_one(_: nn.Module, logits: Tensor) -> Tensor:
    exponential = (logits - logits.amax(-1, keepdim=True)).exp()
    return exponential / (1 + exponential.sum(-1, keepdim=True))


def by_logarithm(_: nn.Module, logits: Tensor) -> Tensor:
    return (logits - logits.logsumexp(-1, keepdim=True)).exp()


@pytest.mark.parametrize(
    ("weigh", "kernel"),
    [
        (mixed_and_normed, "aten._softmax"),
        (off_by_one, "aten.exp"),
        (by_logarithm, "aten.exp"),
        (lambda _, logits: (logits - 1.5).sigmoid(), "aten.sigmoid"),
        (lambda _, logits: logits.relu().square() / 5, "aten.relu"),
    ],
    ids=["heads mixed behind", "denominator off by one", "by logsumexp", "sigmoid", "squared rectifier"],
)
def test_what_weighs_values_by_queries_and_keys_is_attention(weigh: Weigh, kernel: str) -> None:
    torch.manual_seed(0)
    anatomy = anatomy_of(nn.Sequential(Block(weigh), Block(weigh)), torch.randn(2, 5, WIDTH))
    assert [b.kind for b in only_stream(anatomy).branches] == ["attention"] * 2
    found = [(s.path, s.heads, s.kv_heads, s.scale, s.kernel) for s in anatomy.attention]
    assert found == [(f"{i}", HEADS, HEADS, 0.5, kernel) for i in range(2)]


def test_a_product_without_an_activation_stays_linear_attention() -> None:
    anatomy = anatomy_of(nn.Sequential(*(Block(lambda _, logits: logits) for _ in range(2))), torch.randn(2, 5, WIDTH))
    assert [b.kind for b in only_stream(anatomy).branches] == ["linear_attention"] * 2
    assert not anatomy.attention


def test_logits_are_measured_where_a_softmax_is_taken_of_them() -> None:
    for weigh, measured in ((by_logarithm, True), (lambda _, logits: logits.sigmoid(), False)):
        model = nn.Sequential(Block(weigh), Block(weigh))
        report = normprobe.probe(model, torch.randn(2, 5, WIDTH), level="forward")
        assert bool(report.attention) is measured
        assert any("no softmax of the logits" in skip.why for skip in report.skipped) is not measured


class Masked(nn.Module):
    """Where a predicted map is low nothing is seen, or everything where all of it is low (attention within masks)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.predict = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        low = (self.predict(x).transpose(0, 1) @ x.permute(1, 2, 0)).sigmoid() < 0.5
        hidden = low.repeat_interleave(HEADS, 0)
        hidden = hidden * (hidden.sum(-1) != hidden.shape[-1]).unsqueeze(-1)
        y = self.norm(x)
        return x + self.attention(y, y, y, attn_mask=hidden)[0]  # type: ignore[no-any-return]


def test_a_mask_that_a_product_predicts_is_neither_a_norm_nor_the_logits() -> None:
    torch.manual_seed(0)
    anatomy = anatomy_of(nn.Sequential(Masked(), Masked()), torch.randn(5, 2, WIDTH))
    assert {n.path for n in anatomy.norms} == {"0.norm", "1.norm"}
    assert [(s.heads, s.head_dim, s.scale) for s in anatomy.attention] == [(2, 4, 0.5)] * 2
