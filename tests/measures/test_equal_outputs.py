"""Outputs of one weight that are the same, counted on tensors and on a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import normprobe
from normprobe.measures.equal_outputs import alike, copied, copies, repeated, same_outputs
from normprobe.records import OpSite, WeightSite
from tests.models import WIDTH
from tests.plain import INPUT, Plain


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


def test_gradients_of_copied_rows_are_compared_row_by_row() -> None:
    weight = nn.Parameter(drawn(4, 16).detach()[[0, 1, 0, 1]])
    gradient = drawn(4, 16).detach()
    assert alike(weight, gradient, site(weight)) == 0
    gradient[2] = gradient[0] * 1.001  # rounding
    assert alike(weight, gradient, site(weight)) == 1
    gradient[3] = gradient[1] * 1.1
    assert alike(weight, gradient, site(weight)) == 1
    turned = nn.Parameter(weight.detach().T.contiguous())
    assert alike(turned, gradient.T.contiguous(), site(turned, axis=1)) == 1
    gradient[3] = 0.0
    assert alike(weight, gradient, site(weight)) == 1
    gradient[1] = 0.0
    assert alike(weight, gradient, site(weight)) == 1
    assert alike(weight, torch.zeros(4, 16), site(weight)) is None
    assert alike(drawn(4, 16), gradient, site(weight)) is None


def test_weights_that_are_copies_are_named_with_the_first() -> None:
    one, other = drawn(4, 6), nn.Parameter(torch.zeros(4, 6))
    late = nn.Parameter(one.detach().clone())
    late.data[3, 5] += 1.0
    held = {"a": one, "b": nn.Parameter(one.detach().clone()), "c": other, "d": nn.Parameter(other.detach()), "e": late}
    sites = [site(weight).model_copy(update={"parameter": name}) for name, weight in held.items()]
    assert copied(held, sites) == {"b": "a"}


class Experts(nn.Module):
    """Tokens go to one of several modules each."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        share, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out.index_add_(0, rows, expert(tokens[rows]) * share[rows, None])
        return out.view_as(x)


class Routed(nn.Module):
    """Two pre-norm blocks of experts, with a final norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.blocks, self.head = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        return self.head(self.norms[2](x))


def test_experts_in_modules_of_their_own() -> None:
    model, x = Routed().eval(), torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    assert [f for f in normprobe.probe(model, x).findings if f.code == "NP605"] == []
    model.blocks[1].experts[2].load_state_dict(model.blocks[1].experts[0].state_dict())
    (found,) = [f for f in normprobe.probe(model, x).findings if f.code == "NP605"]
    assert (found.severity.value, found.places) == (
        "note",
        ("blocks.1.experts.2.0.weight", "blocks.1.experts.2.2.weight"),
    )


def test_layers_in_one_parameter_are_no_experts() -> None:
    model = Plain(stacked=True)
    with torch.no_grad():
        model.qkv[1] = model.qkv[0]
    report = normprobe.probe(model, INPUT)
    assert report.init is not None
    assert {w.copies for w in report.init.weights} == {0}
    assert [f for f in report.findings if f.code == "NP605"] == []


@pytest.mark.parametrize(("mirrored", "alike_", "severity"), [(False, 0, "note"), (True, 64, "warning")])
def test_on_a_model(mirrored: bool, alike_: int, severity: str) -> None:
    """Copied outputs part where different weights read them, and stay where those are copies too."""
    torch.manual_seed(0)
    first, second = nn.Linear(32, 128), nn.Linear(128, 32)
    model = nn.Sequential(first, nn.GELU(), second).eval()
    first.weight.data[64:], first.bias.data[64:] = first.weight.data[:64], first.bias.data[:64]
    if mirrored:
        second.weight.data[:, 64:] = second.weight.data[:, :64]
    for level, known in (("forward", None), ("backward", alike_)):
        report = normprobe.probe(model, torch.randn(4, 32), level=level)
        assert report.init is not None
        assert [(w.repeated, w.alike) for w in report.init.weights] == [(64, known), (0, None)]
        (found,) = [f for f in report.findings if f.code == "NP605"]
        assert (found.value, found.where) == (0.5, "0.weight")
        assert found.severity.value == (severity if level == "backward" else "note")
