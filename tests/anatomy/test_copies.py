"""What repeats itself, or is mixed by a small matrix, is no copy of the trunk where it runs over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream
from tests.anatomy.test_topology import DEPTH, MLP, WIDTH, Block, Net, read


class Graph(nn.Module):
    """Nodes that a fixed matrix averages over their neighbours before each residual MLP."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.register_buffer("near", torch.rand(nodes, nodes))
        self.embed, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.norms, self.mlps = (nn.ModuleList(f() for _ in range(DEPTH)) for f in (lambda: nn.LayerNorm(WIDTH), MLP))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = self.near @ x
            x = x + mlp(norm(x))
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("nodes", [6, 40])
def test_nodes_that_a_matrix_mixes_are_no_copies_however_few(nodes: int) -> None:
    streams = anatomy_of(Graph(nodes), torch.randn(nodes, WIDTH)).streams
    assert [(s.topology, s.copies, s.depth) for s in streams] == [("ordinary", 1, 1)] * DEPTH


@pytest.mark.parametrize(
    "spread", [lambda y, x: y.expand_as(x), lambda y, x: y.repeat(1, x.shape[1], 1)], ids=["expand", "repeat"]
)
def test_one_result_for_all_tokens_is_no_copy_of_the_trunk(spread: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Context(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            return x + spread(self.mlp(self.norm2(x).mean(1, keepdim=True)), x)

    stream = only_stream(read(Net(Context)))
    assert (stream.topology, stream.copies, stream.depth) == ("ordinary", 1, 2 * DEPTH)
