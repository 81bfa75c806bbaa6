"""Outputs of one weight that are the same, counted on tensors and on a model."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import normprobe
from normprobe.measures.equal_outputs import copies, repeated, same_outputs
from normprobe.records import OpSite, WeightSite


def site(weight: Tensor, kind: Any = "linear", axis: int = 0, fan_in: int | None = None, groups: int = 1) -> WeightSite:
    places = torch.Size(weight.shape[2:]).numel() if kind == "conv" else 1
    inputs = fan_in or torch.Size(weight.shape).numel() // weight.shape[axis]
    return WeightSite(
        parameter="w",
        roles=("reader",),
        shape=tuple(weight.shape),
        fan_in=inputs,
        fan_out=weight.shape[axis] * places // groups,
        output_axis=axis,
        kind=kind,
        operand=1,
        site=OpSite(path=".", op="aten.addmm"),
    )


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


@given(st.integers(2, 20), st.integers(4, 200), st.booleans(), st.data())
def test_copied_rows_are_counted(rows: int, columns: int, turned: bool, data: st.DataObject) -> None:
    weight = drawn(rows, columns)
    sources = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
    held = nn.Parameter(weight.detach()[sources])
    made = nn.Parameter(held.detach().T.contiguous()) if turned else held
    assert repeated(made, site(made, axis=int(turned))) == rows - len(set(sources))
    assert repeated(weight, site(weight)) == 0


def test_what_does_not_count() -> None:
    zero = nn.Parameter(torch.cat([torch.zeros(8, 16), drawn(8, 16).detach()]))
    assert repeated(zero, site(zero)) == 0
    frozen = nn.Parameter(torch.ones(8, 16), requires_grad=False)
    assert (repeated(frozen, site(frozen)), same_outputs(frozen, site(frozen))) == (0, False)
    short = nn.Parameter(torch.ones(8, 3))
    assert repeated(short, site(short)) == 0
    late = drawn(4, 512).detach()
    late[1] = late[0]
    late[1, 501] += 1.0  # the same in the numbers that are looked at first
    assert repeated(nn.Parameter(late), site(late)) == 0


def test_kernels_are_compared_where_they_read_the_same() -> None:
    blur = nn.Parameter(torch.full((8, 1, 3, 3), 1 / 9))
    depthwise = site(blur, "conv", groups=8)
    assert (repeated(blur, depthwise), same_outputs(blur, depthwise)) == (0, False)
    paired = nn.Parameter(drawn(4, 2, 3, 3).detach().repeat(2, 1, 1, 1))  # two groups of four: each all different
    assert repeated(paired, site(paired, "conv", groups=2)) == 0
    assert repeated(paired, site(paired, "conv")) == 4
    shuffled = nn.Parameter(drawn(4, 2, 3, 3).detach().repeat_interleave(4, 0))
    assert repeated(shuffled, site(shuffled, "conv")) == 0
    turned = nn.ConvTranspose2d(2, 6, 3)
    turned.weight.data[:, 3:] = turned.weight.data[:, :3]
    assert repeated(turned.weight, site(turned.weight, "conv", axis=1)) == 3


def test_experts_are_matrices_of_their_own() -> None:
    weight = drawn(4, 6, 5)
    layout = site(weight, "experts", axis=1, fan_in=5)
    assert (repeated(weight, layout), copies(weight, layout)) == (0, 0)
    weight.data[2] = weight.data[0]
    assert (repeated(weight, layout), copies(weight, layout)) == (0, 1)
    weight.data[1, 3:] = weight.data[1, :3]
    assert repeated(weight, layout) == 3
    assert copies(nn.Parameter(weight[0].detach()), site(weight[0])) == 0


def test_on_a_model() -> None:
    torch.manual_seed(0)
    first = nn.Linear(32, 128)
    model = nn.Sequential(first, nn.GELU(), nn.Linear(128, 32)).eval()
    first.weight.data[64:] = first.weight.data[:64]
    report = normprobe.probe(model, torch.randn(4, 32))
    assert report.init is not None
    assert [w.repeated for w in report.init.weights] == [64, 0]
    (found,) = [f for f in report.findings if f.code == "NP605"]
    assert (found.severity.value, found.value, found.where) == ("warning", 0.5, "0.weight")
