"""Weight rows of heads where the projection's weight is a slice of a larger parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normprobe


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
