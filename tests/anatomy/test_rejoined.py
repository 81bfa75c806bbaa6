"""Streams that are cut in pieces and put together again, and streams that only a loss is computed from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


class Rejoined(nn.Module):
    """A pre-norm branch; gives the stream back in two pieces, put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.write = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x + self.write(self.norm(x))).tensor_split(2, 1)
        return torch.cat([first, second], 1)


def body() -> nn.Module:
    return nn.Sequential(*[Rejoined() for _ in range(3)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def test_a_stream_that_is_cut_and_put_together_again_goes_on() -> None:
    stream = only_stream(anatomy_of(body(), torch.randn(2, 5, WIDTH)))
    assert (stream.depth, stream.placement, stream.final_norm) == (3, "pre", "3")


def test_a_model_that_returns_its_loss_alone_is_read() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    stream = only_stream(anatomy_of(Loss(), torch.randn(2, 5, WIDTH)))
    assert (stream.depth, stream.final_norm) == (3, "body.3")
