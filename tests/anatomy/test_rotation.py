"""A rotary embedding written with complex numbers is one."""

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
