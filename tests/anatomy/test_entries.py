"""Where branches without a norm read the stream, the constant they read it through, and what is seen there."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.records import Branch
from tests import models
from tests.anatomy.reading import anatomy_of
from tests.checks.norm_free import networks

WIDTH = 8


class Reads(nn.Module):
    """Two branches on a stream of vectors, each read by the same rule."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule, self.factor = rule, nn.Parameter(torch.tensor(0.5))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 20, bias=i % 2 == 0) for i in range(2))
        self.others = nn.ModuleList(nn.Linear(WIDTH, 20) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(20, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def read(self, i: int, x: Tensor) -> Tensor:
        up, other = self.ups[i], self.others[i]
        readings = {
            "plain": lambda: up(x),
            "scaled": lambda: up(0.25 * x),
            "twice": lambda: up(torch.relu(x / 2) * 3.0),
            "bound": lambda: up(x.mul(0.5).transpose(0, 1)).transpose(0, 1),
            "both": lambda: up(0.5 * x) * other(0.5 * x),
            "unlike": lambda: up(0.5 * x) * other(0.25 * x),
            "learned": lambda: up(self.factor * x),
            "normed": lambda: up(0.5 * self.norm(x)),
            "turned": lambda: (up.weight @ (0.125 * x).mT).mT,
        }
        return readings[self.rule]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(2):
            x = x + self.downs[i](F.gelu(self.read(i, x)))
        return x


def branches(rule: str) -> tuple[Branch, ...]:
    torch.manual_seed(0)
    shape = (5, WIDTH) if rule == "turned" else (2, 5, WIDTH)  # rows that are folded would turn it back
    (stream,) = anatomy_of(Reads(rule), torch.randn(shape)).streams
    return stream.branches


@pytest.mark.parametrize(
    ("rule", "scale"),
    [
        ("plain", 1.0),
        ("scaled", 0.25),
        ("twice", 1.5),
        ("bound", 0.5),
        ("both", 0.5),
        ("unlike", None),
        ("learned", None),
        ("turned", 0.125),
    ],
)
def test_the_constant_between_the_trunk_and_the_first_weights(rule: str, scale: float | None) -> None:
    found = branches(rule)
    assert len(found) == 2
    for branch in found:
        assert branch.entry is not None
        assert branch.entry.scale == (None if scale is None else pytest.approx(scale))
        assert branch.entry.operand == (1 if rule == "turned" else 0)


def test_a_norm_in_front_of_the_weights_leaves_no_entry() -> None:
    assert [branch.entry for branch in branches("normed")] == [None, None]
    (stream,) = anatomy_of(*models.gpt2()).streams
    assert {branch.entry for branch in stream.branches} == {None}


def test_convolutions_read_by_constants_and_what_they_are_given() -> None:
    torch.manual_seed(0)
    model = networks.Free().eval()
    x = torch.randn(networks.IMAGE)
    report = normprobe.probe(model, x)
    (stream,), (measure,) = report.anatomy.streams, report.measurements.residual
    assert report.anatomy.held_by_constants(stream)
    constants = [1.0, 1 / math.sqrt(1.04), 1 / math.sqrt(1.08), 1.0, 1 / math.sqrt(1.04), 1 / math.sqrt(1.08)]
    scales = [branch.entry.scale for branch in stream.branches if branch.entry is not None]
    told = [
        1.7868 * c if branch.skip == "identity" else 1.0 for c, branch in zip(constants, stream.branches, strict=True)
    ]
    assert scales == pytest.approx(told)
    seen: list[float] = []
    for block in model.blocks:
        block.first.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].double().std(correction=0))))
    with torch.no_grad():
        model(x)
    assert [state.input_std for state in measure.states] == pytest.approx(seen, rel=1e-5)


def test_nothing_is_measured_where_norms_hold_the_stream() -> None:
    for made in (models.gpt2(), models.torch_encoder(norm_first=False, final=False)):
        report = normprobe.probe(*made)
        assert not any(report.anatomy.held_by_constants(stream) for stream in report.anatomy.streams)
        assert {state.input_std for measure in report.measurements.residual for state in measure.states} == {None}
