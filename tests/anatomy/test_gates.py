"""Gates, conditions and routers scale a branch; they do not decide where its norms sit nor what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normprobe.records import Branch
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Modulated(nn.Module):
    """Shift, scale and gate are made from a condition: one vector for all tokens, or one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH, elementwise_affine=False), mlp()
        self.condition = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.condition(c).chunk(3, -1)
        return x + gate * self.f(self.norm(x) * (1 + scale) + shift)


class Gated(nn.Module):
    """A sigmoid of the raw stream gates the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.gate = nn.LayerNorm(WIDTH), mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.f(self.norm(x))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, c)
        out: Tensor = self.head(self.norm(x))
        return out


def branches(block: Callable[[], nn.Module], tokens: int) -> tuple[Branch, ...]:
    torch.manual_seed(0)
    return only_stream(anatomy_of(Net(block), (torch.randn(2, 6, WIDTH), torch.randn(2, tokens, WIDTH)))).branches


@pytest.mark.parametrize("tokens", [1, 6], ids=["one condition for all tokens", "one for each"])
def test_a_modulated_branch_is_a_gated_mlp_behind_its_norm(tokens: int) -> None:
    found = branches(Modulated, tokens)
    assert [(b.kind, b.placement, b.branch_scale.kind) for b in found] == [("mlp", "pre", "gate")] * 3
    assert found[0].pre_norm == "blocks.0.norm"
    assert set(found[0].writers) == {"blocks.0.f.2.weight", "blocks.0.f.2.bias"}


def test_a_gate_on_the_raw_stream_leaves_the_branch_pre_norm() -> None:
    found = branches(Gated, 1)
    assert [(b.kind, b.placement, b.branch_scale.kind) for b in found] == [("mlp", "pre", "gate")] * 3
    assert set(found[1].readers) == {"blocks.1.f.0.weight", "blocks.1.f.0.bias"}
    assert set(found[1].writers) == {"blocks.1.f.2.weight", "blocks.1.f.2.bias"}


def test_squeeze_and_excitation_leaves_the_norm_behind_the_branch() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.squeeze = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            return torch.relu(x + y * self.squeeze(y.mean((2, 3), keepdim=True)).sigmoid())

    stream = only_stream(anatomy_of(nn.Sequential(*(Squeezed() for _ in range(3))), torch.randn(2, 4, 5, 6)))
    assert stream.placement == "postact"
    assert [b.branch_scale.kind for b in stream.branches] == ["none"] * 3


class Excited(nn.Module):
    """The branch weighs its own channels, then come a constant and a learned number."""

    def __init__(self, constant: float, gain: float | None) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), mlp()
        self.squeeze, self.excite, self.constant = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), constant
        self.gain = None if gain is None else nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        y = self.f(self.norm(x))
        y = y * torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean(1, keepdim=True)))))
        y = y if self.constant == 1 else self.constant * y
        return x + (y if self.gain is None else self.gain * y)


@pytest.mark.parametrize(
    ("constant", "gain", "kind", "value"),
    [(1.0, None, "none", None), (0.5, None, "constant", 0.5), (1.0, 0.25, "scalar", 0.25), (2.0, 0.25, "scalar", 0.5)],
)
def test_squeeze_and_excitation_is_part_of_the_branch_and_no_scale_on_it(
    constant: float, gain: float | None, kind: str, value: float | None
) -> None:
    for branch in branches(lambda: Excited(constant, gain), 1):
        assert (branch.branch_scale.kind, branch.branch_scale.value) == (kind, value)
