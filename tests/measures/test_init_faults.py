"""What shows that weights were drawn by a wrong count of inputs, or cannot part: on single weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normprobe.measures.draws import fit
from normprobe.measures.equal_outputs import same_outputs
from normprobe.measures.init_faults import misread
from normprobe.records import OpSite, WeightSite


def site(shape: tuple[int, ...], fan_in: int, fan_out: int, axis: int, kind: str = "linear") -> WeightSite:
    return WeightSite(
        parameter="w",
        roles=("other",),
        shape=shape,
        fan_in=fan_in,
        fan_out=fan_out,
        output_axis=axis,
        kind=kind,  # type: ignore[arg-type]
        operand=1,
        site=OpSite(path=".", op="aten.mm"),
    )


def drawn(shape: tuple[int, ...], std: float) -> Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (64 * 96, ("lecun",)),  # the second axis and all behind it, as torch counts
        (96, ("lecun",)),  # the outputs of each expert
        (64, ()),  # its inputs
        (50, ()),
    ],
)
def test_experts_are_misread_by_torch_or_by_their_outputs(count: int, told: tuple[str, ...]) -> None:
    weight = drawn((4, 64, 96), math.sqrt(1 / count))
    assert misread(site((4, 64, 96), 64, 96, 2, "experts"), fit(weight, 0)) == told


def test_tables_and_weights_without_a_distribution_are_not_judged() -> None:
    weight = drawn((64, 96), math.sqrt(1 / 96))
    assert misread(site((64, 96), 64, 96, 1), fit(weight, 0)) == ("lecun",)
    assert misread(site((64, 96), 64, 96, 1, "embedding"), fit(weight, 0)) == ()
    assert misread(site((64, 96), 64, 96, 1), fit(torch.full((64, 96), 0.1), 0)) == ()
    assert misread(site((64, 64), 64, 64, 1), fit(nn.init.orthogonal_(torch.empty(64, 64)), 0)) == ()


def test_a_plain_draw_is_no_wrong_count() -> None:
    """A standard deviation of 1 fits every recipe by a count of 1, as of a weight with one output."""
    weight = drawn((4096, 1), 1.0)
    assert misread(site((4096, 1), 4096, 1, 1), fit(weight, 0)) == ()


def learned(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous())


@pytest.mark.parametrize("axis", [0, 1])
def test_outputs_that_are_the_same(axis: int) -> None:
    weight, where = learned(drawn((8, 8), 1.0)), site((8, 8), 8, 8, axis)
    equal = learned(weight.detach().narrow(axis, 0, 1).expand(8, 8))
    assert same_outputs(equal, where)
    assert same_outputs(learned(torch.full((8, 8), 0.1)), where)
    assert not same_outputs(equal.detach(), where)  # not trained: nothing has to part
    assert not same_outputs(equal, site((8, 8), 8, 8, 1 - axis))
    assert not same_outputs(weight, where)
    assert not same_outputs(learned(torch.zeros(8, 8)), where)
    assert not same_outputs(learned(torch.full((8, 8), math.nan)), where)
    assert not same_outputs(learned(torch.ones(8, 8)), site((8, 8), 8, 8, axis, "embedding"))
    one = learned(torch.ones((1, 8) if axis == 0 else (8, 1)))
    assert not same_outputs(one, site(tuple(one.shape), 8, 1, axis))
