"""Trunks that go on through a choice of tokens, writes in place, rows added in their places and spread sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normprobe
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, TOKENS = 8, 6


class Block(nn.Module):
    """Parts of a pre-norm block, joined by `way`."""

    def __init__(self, way: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.norm, self.route = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def routed(block: Block, x: Tensor) -> Tensor:
    return torch.where(block.route(x) > 0, x + block.branch(x), x)


def chosen(block: Block, x: Tensor) -> Tensor:
    weight, index = block.route(x).sigmoid().topk(3, dim=1)
    index = index.expand(-1, -1, WIDTH)
    return x.scatter_add(1, index, weight * block.branch(x.gather(1, index)))


def put_back(block: Block, x: Tensor) -> Tensor:
    index = block.route(x).topk(3, dim=1).indices.expand(-1, -1, WIDTH)
    picked = x.gather(1, index)
    return x.scatter(1, index, picked + block.branch(picked))


def masked(block: Block, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    return x.masked_scatter(mask[..., None], x + block.branch(x))


def sliced(block: Block, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] += block.branch(x)[:, 1:]
    return x


def copied(block: Block, x: Tensor) -> Tensor:
    x = x.clone()
    x[:] = x + block.branch(x)
    return x


def beside(block: Block, x: Tensor) -> Tensor:
    return torch.cat([x[:, :1] + block.branch(x)[:, :1], x[:, 1:]], 1)


def excited(block: Block, x: Tensor) -> Tensor:
    x = x + block.branch(x)
    return x * block.route(x.mean(1, keepdim=True)).sigmoid()


def spread(block: Block, x: Tensor) -> Tensor:
    return x + block.branch(x.mean(1, keepdim=True))


@pytest.mark.parametrize("way", [routed, chosen, put_back, masked, sliced, copied, spread, beside])
def test_the_trunk_is_one_stream_and_its_raw_end_is_seen(way: Callable[[Block, Tensor], Tensor]) -> None:
    model = nn.Sequential(*[Block(way) for _ in range(3)], nn.Linear(WIDTH, 5))
    report = normprobe.probe(model, torch.randn(2, TOKENS, WIDTH), level="structure")
    stream = only_stream(report.anatomy)
    assert (stream.depth, stream.placement, stream.topology) == (3, "pre", "ordinary")
    assert stream.branches[1].pre_norm == "1.norm"
    assert "NP201" in {finding.code for finding in report.findings}


def test_a_gate_that_the_trunk_makes_for_itself_does_not_end_it() -> None:
    model = nn.Sequential(*[Block(excited) for _ in range(3)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    stream = only_stream(anatomy_of(model, torch.randn(2, TOKENS, WIDTH)))
    assert (stream.depth, stream.topology, stream.final_norm) == (3, "ordinary", "3")


class Dual(nn.Module):
    """A residual path and one that grows, put side by side; every block reads both."""

    def __init__(self, grown: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH + grown), nn.Linear(WIDTH + grown, 16)
        self.down = nn.Linear(16, WIDTH + 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(self.norm(x))))
        return torch.cat([x[..., :WIDTH] + y[..., :WIDTH], x[..., WIDTH:], y[..., WIDTH:]], -1)


def test_one_of_two_paths_that_are_read_side_by_side_is_one_stream() -> None:
    model = nn.Sequential(*[Dual(2 * i) for i in range(4)], nn.LayerNorm(WIDTH + 8), nn.Linear(WIDTH + 8, 5))
    stream = only_stream(anatomy_of(model, torch.randn(2, TOKENS, WIDTH)))
    assert (stream.depth, stream.width, stream.final_norm) == (4, WIDTH, "4")


def test_what_another_stream_adds_to_a_part_of_the_trunk_does_not_end_it() -> None:
    """Finer features are added to all tokens but the first, before every block."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.fine, self.coarse = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            layers = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)) for _ in range(3)]
            self.up = nn.ModuleList(nn.Sequential(*each) for each in layers)
            self.blocks = nn.ModuleList(Block(lambda block, x: x + block.branch(x)) for _ in range(3))
            self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))

        def forward(self, x: Tensor) -> Tensor:
            fine = self.fine(x)
            x = torch.cat([self.token.expand(len(x), -1, -1), self.coarse(x)], 1)
            for up, block in zip(self.up, self.blocks, strict=True):
                x = block(torch.cat([x[:, :1], x[:, 1:] + up(fine)], 1))
            return self.head(x)  # type: ignore[no-any-return]

    stream = only_stream(anatomy_of(Nested(), torch.randn(2, TOKENS, WIDTH)))
    assert [b.block for b in stream.branches[1:]] == [f"blocks.{i}" for i in range(3)]  # the first sum joins both
    assert stream.final_norm == "head.0"


def test_a_branch_masked_by_a_number_is_read() -> None:
    def zeroed(block: Block, x: Tensor) -> Tensor:
        return x + torch.where(block.route(x) > 0, block.branch(x), torch.zeros(()))

    stream = only_stream(anatomy_of(nn.Sequential(*[Block(zeroed) for _ in range(2)]), torch.randn(2, TOKENS, WIDTH)))
    assert stream.depth == 2


def test_noise_with_a_predicted_size_is_no_branch() -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            mean = self.mean(x)
            return mean + torch.randn_like(mean) * (0.5 * self.log(x)).exp()

    assert not anatomy_of(nn.Sequential(Sampled(), nn.Linear(WIDTH, WIDTH)), torch.randn(2, WIDTH)).streams


def test_pieces_of_a_trunk_that_cannot_be_followed_are_not_said_to_need_no_norm() -> None:
    def smaller(block: Block, x: Tensor) -> Tensor:
        return torch.minimum(x + block.branch(x), x)

    anatomy = anatomy_of(nn.Sequential(*[Block(smaller) for _ in range(2)]), torch.randn(2, TOKENS, WIDTH))
    assert [s.depth for s in anatomy.streams] == [1, 1]
    assert all(s.needs_final_norm is None and s.final_norm_reason for s in anatomy.streams)


def test_a_branch_that_two_trunks_add_is_written_to_both() -> None:
    class Dual(nn.Module):
        """Post-norm blocks whose branches are also summed without norms; the sum is normed at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
            self.final = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            summed = x
            for layer, norm in zip(self.layers, self.norms, strict=True):
                y = layer(x).relu()
                summed, x = summed + y, norm(x + y)
            return x + self.final(summed)

    streams = anatomy_of(Dual(), torch.randn(2, TOKENS, WIDTH)).streams
    assert [(s.depth, s.placement, s.final_norm) for s in streams] == [(3, "none", "final"), (3, "post", None)]


def summed(y: Tensor, mask: Tensor, expert: nn.Module, x: Tensor) -> None:
    y[mask] = y[mask] + expert(x[mask])


def accumulated(y: Tensor, mask: Tensor, expert: nn.Module, x: Tensor) -> None:
    y[mask] += expert(x[mask])


def put(y: Tensor, mask: Tensor, expert: nn.Module, x: Tensor) -> None:
    y[mask] = expert(x[mask])


@pytest.mark.parametrize("write", [summed, accumulated, put])
def test_what_experts_write_where_a_router_chose_them_is_one_branch(
    write: Callable[[Tensor, Tensor, nn.Module, Tensor], None],
) -> None:
    """The mask that chooses the rows is no trunk, though the zeros that it chooses depend on nothing else."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.route = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            y, choice = torch.zeros_like(h), self.route(h).argmax(-1)
            for number, expert in enumerate(self.experts):
                write(y, choice == number, expert, h)
            return x + y

    torch.manual_seed(0)
    model = nn.Sequential(*[Experts() for _ in range(3)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    stream = only_stream(anatomy_of(model, torch.randn(2, TOKENS, WIDTH)))
    assert (stream.depth, stream.placement, stream.final_norm) == (3, "pre", "3")
    assert [b.kind for b in stream.branches] == ["moe"] * 3
    assert stream.branches[0].writers == tuple(f"0.experts.{i}.{p}" for i in range(3) for p in ("bias", "weight"))
