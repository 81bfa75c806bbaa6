"""The axis of a stream's features is told at each write, from the data flow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, TOKENS = 16, 7


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class MixesTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.f(x.transpose(1, 2)).transpose(1, 2)
        return out


class Coarse(nn.Module):
    """A branch on every other place of the map; the norm acts on groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.write = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.write(F.relu(self.norm(F.avg_pool2d(x, 2))))
        return x + F.interpolate(y, scale_factor=2)


class Turning(nn.Module):
    """Writes to maps with the channels first, then to the same maps with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.batch, self.conv = nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(F.relu(self.batch(x)))
        x = x.permute(0, 2, 3, 1)
        x = x + self.mlp(self.norm(x))
        return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize("embed", [nn.Linear(WIDTH, WIDTH), nn.Identity()], ids=["embedded", "given"])
def test_writers_that_mix_tokens_do_not_make_them_features(embed: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.f = embed, nn.ModuleList([MixesTokens(), mlp(WIDTH), MixesTokens()])
            self.norms, self.norm, self.head = (
                nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3)),
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for norm, f in zip(self.norms, self.f, strict=True):
                x = x + f(norm(x))
            out: Tensor = self.head(self.norm(x))
            return out

    stream = only_stream(anatomy_of(Net(), torch.randn(2, TOKENS, WIDTH)))
    assert (stream.width, stream.feature_axis, stream.depth) == (WIDTH, -1, 3)


def test_a_branch_that_is_upsampled_is_added_to_the_same_features() -> None:
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), Coarse(), Coarse(), Coarse())
    stream = only_stream(anatomy_of(model, torch.randn(2, 3, 8, 8)))
    assert (stream.widths, stream.feature_axis, stream.topology) == ((WIDTH,), 1, "ordinary")


def test_each_write_is_measured_along_its_own_axis_of_features() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), Turning(), Turning())
    report = normprobe.probe(model, torch.randn(2, 3, 6, 10))
    stream = only_stream(report.anatomy)
    assert (stream.widths, [b.feature_axis for b in stream.branches]) == ((WIDTH,), [1, -1, 1, -1])
    (measure,) = report.residual
    assert [s.abs_argmax_channel < WIDTH for s in measure.states] == [True] * 4
    assert measure.basis.count == 2 * 6 * 10


def test_an_axis_that_nothing_tells_is_unknown_and_not_measured() -> None:
    report = normprobe.probe(nn.Sequential(Coarse(), Coarse()), torch.randn(2, WIDTH, 6, 10))
    stream = only_stream(report.anatomy)
    assert (stream.width, stream.feature_axis, report.residual) == (None, None, ())
    assert any("axis of its features" in s.why for s in report.skipped)
