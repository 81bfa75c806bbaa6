"""Which query rows are looked at."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ROWS = 64  # query rows that are looked at


@lru_cache(maxsize=8)
def sampled_rows(count: int, seed: int, exact: bool = False) -> Tensor:
    """All of `count` rows where there are at most `ROWS` or `exact` asks for them, else a seeded sample of as many.

    All sites of a model ask for the same: the tensor is shared.
    """
    return torch.arange(count, device="cpu") if exact or count <= ROWS else one_of_each(count, seed)


def one_of_each(count: int, seed: int) -> Tensor:
    """One row of each of `ROWS` stretches of `count` rows that are equally long, but for one row.

    What a row tells depends on how many keys it sees; such a sample is nearer to all rows than one from anywhere.
    """
    edges = torch.arange(ROWS + 1, device="cpu") * count // ROWS
    inside = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed), device="cpu")
    return edges[:-1] + (inside * edges.diff()).long()
