"""Readers and writers are held against the model; wrong ones are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.flow import holds, skips
from normprobe import probe
from normprobe.records import Anatomy

WIDTH = 8
INPUTS = {"x": torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self, used: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.used = used

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"first": states[self.used] * 1.0, "last": states[-1]}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) + self.b(x))  # a sum, but of nothing that goes around anything


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        skip = (2 * x).transpose(0, 1).contiguous()
        return skip.add_(self.inner(x).transpose(0, 1))


def read(model: nn.Module) -> Anatomy:
    return probe(model, INPUTS, level="structure").anatomy


def model(used: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Residual(used).eval()


def changed(anatomy: Anatomy, **fields: tuple[str, ...]) -> Anatomy:
    """The same anatomy with other readers or writers in every branch."""
    (stream,) = anatomy.streams
    branches = tuple(branch.model_copy(update=fields) for branch in stream.branches)
    return anatomy.model_copy(update={"streams": (stream.model_copy(update={"branches": branches}),)})


def test_right_readers_and_writers_hold() -> None:
    net = model()
    held = holds(net, INPUTS, read(net))
    assert (held.fault, held.tried, held.unreachable) == (None, 2, [])


def test_parameters_are_put_back() -> None:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    holds(net, INPUTS, read(net))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_missing_writer_is_told() -> None:
    net = model()
    wrong = changed(read(net), readers=("blocks.0.up.weight",), writers=("blocks.0.down.bias",))
    assert "with its writers zeroed its readers still move" in str(holds(net, INPUTS, wrong).fault)


def test_readers_that_move_nothing_are_told() -> None:
    net = model()
    net.register_parameter("idle", nn.Parameter(torch.ones(3)))
    assert "its readers move the output by 0.0e+00 only" in str(
        holds(net, INPUTS, changed(read(net), readers=("idle",))).fault
    )


@pytest.mark.parametrize(("side", "names"), [("readers", ()), ("writers", ()), ("writers", ("nowhere.weight",))])
def test_absent_parameters_are_told(side: str, names: tuple[str, ...]) -> None:
    net = model()
    wanted = "no parameter nowhere.weight" if names else f"no {side}"
    assert wanted in str(holds(net, INPUTS, changed(read(net), **{side: names})).fault)


def test_a_branch_behind_the_output_is_held_and_named() -> None:
    net = model(used=1)
    held = holds(net, INPUTS, read(net))
    assert held.fault is None
    assert [place.split()[0] for place in held.unreachable] == ["blocks.1"]


def test_parameters_that_nothing_reads_are_no_unreachable_branch() -> None:
    net = model()
    net.register_parameter("idle", nn.Parameter(torch.ones(3)))
    net.register_parameter("other", nn.Parameter(torch.ones(3)))
    held = holds(net, INPUTS, changed(read(net), readers=("idle",), writers=("other",)))
    assert held.fault is not None
    assert held.unreachable == []


class Pooling(Block):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x).transpose(1, 2)
        x = x + nn.functional.avg_pool1d(normed, 3, 1, 1).transpose(1, 2)
        return super().forward(x)


def test_a_mixer_without_weights_is_not_tried() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Pooling(), Pooling())
    inputs = {"input": INPUTS["x"]}
    anatomy = probe(net, inputs, level="structure").anatomy
    assert [branch.kind for branch in anatomy.streams[0].branches] == ["conv", "mlp"] * 2
    held = holds(net, inputs, anatomy)
    assert (held.fault, held.tried) == (None, 2)


class Segments(Block):
    """Attention inside segments, that begin where a score is small: with weak weights every token is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.query, self.key = nn.Linear(WIDTH, 1, bias=False), Block(), Block()
        nn.init.normal_(self.score.weight, std=0.03)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        segment = (self.score(h)[..., 0].abs() < 0.3).cumsum(-1)
        apart = segment[:, :, None] != segment[:, None]
        q, k, v = self.query.down(self.query.up(h)), self.key.down(self.key.up(h)), self.up(h)
        weights = (q @ k.transpose(1, 2)).masked_fill(apart, -torch.inf).softmax(-1)
        return x + self.down(weights @ v)


def test_readers_that_one_draw_of_the_weights_hides_are_tried_with_others() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Segments(), Block())
    inputs = {"input": INPUTS["x"]}
    anatomy = probe(net, inputs, level="structure").anatomy
    (stream,) = anatomy.streams
    queries = stream.branches[0].model_copy(update={"readers": ("0.query.up.weight", "0.query.up.bias")})
    anatomy = anatomy.model_copy(
        update={"streams": (stream.model_copy(update={"branches": (queries, stream.branches[1])}),)}
    )
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert holds(net, inputs, anatomy).fault is None
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_no_streams_do_not_hold() -> None:
    assert holds(model(), INPUTS, Anatomy()).fault == "a stream without branches"


def test_a_residual_add_is_seen_through_views_and_in_place() -> None:
    assert len(skips(model(), INPUTS)) == 2
    assert len(skips(Views(), INPUTS)) == 1


def test_a_sum_of_two_branches_is_no_residual_add() -> None:
    assert skips(Plain(), INPUTS) == []
