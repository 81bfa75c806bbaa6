"""Which sums make a stream: branches without weights, sums inside a branch, skips over whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Fourier(nn.Module):
    """A post-norm block whose token mixer has no weights, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(linear(), nn.GELU(), linear())
        self.out = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x + torch.fft.fft2(x).real)
        return self.out(x + self.mlp(x))


def test_mixer_without_weights_is_a_branch_without_writers() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Fourier(), Fourier()), torch.randn(2, 5, WIDTH)))
    assert [(b.block, b.kind, b.placement) for b in stream.branches] == [
        (block, kind, "post") for block in "01" for kind in ("other", "mlp")
    ]
    assert stream.branches[0].writers == ()
    assert stream.branches[0].post_norm == "0.mixed"


def test_sums_without_any_weights_are_no_stream() -> None:
    class Prepared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + x.cumsum(1))

    assert anatomy_of(Prepared(), torch.randn(2, 5, WIDTH)).streams == ()


class Fed(nn.Module):
    """A block whose branch adds something to what it reads: `x + f(norm(x + g(x)))`."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.norm = nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear()), nn.LayerNorm(WIDTH)
        self.write = nn.Sequential(linear(), nn.GELU(), linear())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.write(self.norm(x + self.read(x)))


def test_sum_inside_the_last_branch_does_not_end_the_stream() -> None:
    blocks = nn.Sequential(Fed(), Fed())
    stream = only_stream(anatomy_of(nn.Sequential(blocks, nn.LayerNorm(WIDTH), linear()), torch.randn(2, 5, WIDTH)))
    assert [b.block for b in stream.branches] == ["0.0", "0.1"]
    assert all(b.writers == (f"{b.block}.write.2.bias", f"{b.block}.write.2.weight") for b in stream.branches)
    assert stream.final_norm == "1"
