"""Norms on queries and keys are seen behind every way to write a rotary embedding, and where tokens are joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of

WIDTH, HEADS, HEAD, TOKENS = 32, 4, 8, 6
Rotary = Callable[[Tensor], Tensor]


def angles() -> Tensor:
    return torch.outer(torch.arange(TOKENS), 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD))


def complex_numbers(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones(TOKENS, HEAD // 2), angles())).flatten(-2)


def interleaved(x: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles().cos(), angles().sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles().cos(), angles().sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Mix(nn.Module):
    """Attention with norms on queries and keys; `joined` gives half of the tokens projections of their own."""

    def __init__(self, rotary: Rotary, joined: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2 if joined else 1))
        self.query, self.key = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pieces = []
        for part, tokens in zip(self.parts, x.chunk(len(self.parts), 1), strict=True):
            split = part(tokens).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
            pieces.append((self.query(split[0]), self.key(split[1]), split[2]))
        q, k, v = (torch.cat(same, 2) if len(same) > 1 else same[0] for same in zip(*pieces, strict=True))
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rotary", [complex_numbers, interleaved, halves])
@pytest.mark.parametrize("joined", [False, True])
def test_query_and_key_norms(rotary: Rotary, joined: bool) -> None:
    found = anatomy_of(nn.Sequential(Mix(rotary, joined), Mix(rotary, joined)), torch.randn(2, TOKENS, WIDTH))
    assert {n.path: n.role for n in found.norms} == {f"{i}.{name}": name for i in (0, 1) for name in ("query", "key")}
    for site in found.attention:
        assert site.scale == pytest.approx(HEAD**-0.5)
        assert site.qk_norm is not None
        assert (site.qk_norm.axis, site.qk_norm.rope) == ("head", "before")


def test_joined_tokens_without_a_rotary_embedding() -> None:
    found = anatomy_of(nn.Sequential(Mix(lambda x: x, True), Mix(lambda x: x, True)), torch.randn(2, TOKENS, WIDTH))
    assert [s.qk_norm is not None and s.qk_norm.rope for s in found.attention] == ["none", "none"]


class Weighed(nn.Module):
    """Attention whose joint projection is multiplied by a known number for each feature."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x) * self.factors
        q, k, v = (part.transpose(1, 2) for part in made.unflatten(-1, (HEADS, 3, HEAD)).unbind(-2))
        y = F.scaled_dot_product_attention(halves(q), halves(k), v)
        return x + self.out(y.transpose(1, 2).flatten(2))


def features(query: float, key: float, value: float) -> Tensor:
    """For each head its queries, its keys, its values."""
    return torch.tensor([query, key, value]).repeat_interleave(HEAD).repeat(HEADS)


def test_factors_of_single_features_count_where_they_are_on_queries_and_keys() -> None:
    uneven = features(0.5, 1.0, 1.0)
    uneven[1] = 0.25
    for factors, times in ((features(0.5, 3.0, 7.0), 1.5), (features(0.25, 1.0, 1.0), 0.25), (uneven, None)):
        found = anatomy_of(nn.Sequential(*(Weighed(factors) for _ in range(2))), torch.randn(2, TOKENS, WIDTH))
        wanted = None if times is None else pytest.approx(times * HEAD**-0.5)
        assert [site.scale for site in found.attention] == [wanted] * 2
        assert found.attention[0].columns["q"].heads[0] == ((0, HEAD),)
