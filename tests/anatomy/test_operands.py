"""Rotary embeddings in complex numbers, clipping and means between projection and attention are passed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of

HEADS, DIM = 2, 8


class Attention(nn.Module):
    """Queries and keys are turned in pairs of features, and normed before or behind that."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.norm_first = nn.Linear(16, 48), nn.Linear(16, 16), norm_first
        self.norm = nn.RMSNorm(DIM, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (HEADS, DIM)) for t in self.qkv(x).chunk(3, -1))
        q, k = (turned(self.norm(t)) if self.norm_first else self.norm(turned(t)) for t in (q, k))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(out.transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(3)


@pytest.mark.parametrize(("norm_first", "rope"), [(True, "before"), (False, "after")])
def test_place_of_the_norm_and_the_scale(norm_first: bool, rope: str) -> None:
    (site,) = anatomy_of(Attention(norm_first), torch.randn(2, 5, 16)).attention
    assert site.scale == pytest.approx(DIM**-0.5)
    assert site.qk_norm is not None
    assert site.qk_norm.rope == rope


@pytest.mark.parametrize("clip", [False, True])
def test_clipping_and_landmarks_keep_the_scale_and_the_norm(clip: bool) -> None:
    class Landmarks(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(2, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            q, k = self.norm(q), self.norm(k) / 2
            if clip:
                q, k = q.clamp(-8, 8), k.clamp(-8, 8)
            else:
                k, v = (t.unflatten(2, (3, 2)).mean(3) for t in (k, v))
            return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    (site,) = anatomy_of(Landmarks(True), torch.randn(2, 6, 16)).attention
    assert site.scale == pytest.approx(0.5)
    assert site.qk_norm is not None
    assert (site.qk_norm.query, site.qk_norm.key, site.qk_norm.axis) == ("norm", "norm", "head")


def test_keys_put_together_from_two_inputs_share_norm_and_scale() -> None:
    class Merged(Attention):
        def forward(self, x: Tensor) -> Tensor:
            def heads(t: Tensor) -> tuple[Tensor, ...]:
                return tuple(p.unflatten(2, (HEADS, DIM)).transpose(1, 2) for p in self.qkv(t).chunk(3, -1))

            (q, k, v), (_, others, values) = heads(x), heads(x.cumsum(1))
            k, v = torch.cat([self.norm(k), self.norm(others)], 2) / 2, torch.cat([v, values], 2)
            return self.out(((self.norm(q) @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    (site,) = anatomy_of(Merged(True), torch.randn(2, 6, 16)).attention
    assert site.scale == pytest.approx(0.5)
    assert site.qk_norm is not None
    assert (site.qk_norm.query, site.qk_norm.key) == ("norm", "norm")
    assert "k" not in site.columns


def test_rows_behind_means_are_not_told() -> None:
    class Pooled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(2, (HEADS, DIM)) for t in self.qkv(x).chunk(3, -1))
            k, v = (t.unflatten(1, (3, 2)).mean(2).permute(0, 2, 1, 3) for t in (k, v))
            return self.out(((q.transpose(1, 2) @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    (site,) = anatomy_of(Pooled(True), torch.randn(2, 6, 16)).attention
    assert site.scale == 1.0
    assert set(site.columns) == {"q"}
