"""Weight rows of heads where the projection's weight is a slice of a larger parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from tests.anatomy.reading import anatomy_of


class Cross(nn.Module):
    """Cross-attention of torch: keys and values use the last two thirds of the packed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.attention(x, memory, memory, need_weights=False)[0]


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_rows_count_from_the_start_of_the_whole_parameter(autocast: str | None) -> None:
    report = normprobe.probe(
        Cross(), (torch.randn(3, 4, 8), torch.randn(3, 5, 8)), level="structure", autocast=autocast
    )
    (site,) = report.anatomy.attention
    assert site.cross
    assert {rows.parameter for rows in site.columns.values()} == {"attention.in_proj_weight"}
    assert {name: rows.heads for name, rows in site.columns.items()} == {
        "q": (((0, 4),), ((4, 8),)),
        "k": (((8, 12),), ((12, 16),)),
        "v": (((16, 20),), ((20, 24),)),
    }
    assert {rows.axis for rows in site.columns.values()} == {0}


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_heads_of_pooled_queries_are_those_of_the_keys(batch: int) -> None:
    class Pooled(nn.Module):
        """Queries are the largest of every four tokens, in windows (Ryali et al. 2023, Hiera)."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).reshape(len(x), -1, 1, 3, 4, 8).permute(3, 0, 4, 2, 1, 5)
            q, k, v = parts.unbind(0)
            q = q.view(len(x), 4, 1, 4, -1, 8).amax(3)
            return F.scaled_dot_product_attention(q, k, v)

    (site,) = anatomy_of(Pooled(), torch.randn(batch, 16, 32)).attention
    assert (site.heads, site.kv_heads, site.head_dim) == (4, 4, 8)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_heads_beside_the_batch_on_one_axis_are_told_from_it(batch: int) -> None:
    class Einsum(nn.Module):
        """Time comes first, and weights have three axes (Yang et al. 2019, XLNet)."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(32, 4, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("ibh,hnd->ibnd", x, w) for w in (self.q, self.k, self.v))
            weights = torch.einsum("ibnd,jbnd->bnij", q, k).softmax(3)
            return torch.einsum("ibnd,hnd->ibh", torch.einsum("bnij,jbnd->ibnd", weights, v), self.o)

    (site,) = anatomy_of(Einsum(), torch.randn(10, batch, 32)).attention
    assert (site.heads, site.kv_heads, site.head_dim) == (4, 4, 8)
