"""Stages of convolutional networks: layers whose batch norm is their own, mixers that are sums of linear layers, and
maps that become rows of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, DEPTH = 8, 3


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def layer(inputs: int, outputs: int, kernel: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Inverted(nn.Module):
    """MobileNetV2's block: the layer that writes has a norm and no activation."""

    def __init__(self, inputs: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down, self.skips = layer(inputs, 12, 3), layer(12, WIDTH), inputs == WIDTH

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(F.relu(self.up(x)))
        return x + out if self.skips else out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH, 1, 1))
        self.up, self.down = layer(WIDTH, 12), layer(12, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.mix(x)
        out: Tensor = x + self.gain * self.down(F.gelu(self.up(x)))
        return out


class Pooled(Scaled):
    """EfficientFormer's mixer: what is near, less what is there."""

    def mix(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x


class Summed(Scaled):
    """FastViT's mixer: a sum of linear layers beside the batch-normed map, less another batch norm of it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layer(WIDTH, WIDTH, 3), layer(WIDTH, WIDTH)
        self.same, self.norm = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return self.same(x) + self.narrow(x) + self.wide(x) - self.norm(x)  # type: ignore[no-any-return]


def test_the_norm_of_the_layer_before_the_first_skip_is_no_entry_norm() -> None:
    blocks = [Inverted(3 if i == 0 else WIDTH) for i in range(DEPTH)]
    anatomy = anatomy_of(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(WIDTH * 64, 5)), image())
    assert only_stream(anatomy).entry_norm is None
    assert {n.path: n.role for n in anatomy.norms}["0.down.1"] == "inner"


def test_the_last_of_several_linear_layers_with_their_norms_is_no_embedding() -> None:
    layers = layer(3, WIDTH, 3), layer(WIDTH, WIDTH, 3)
    anatomy = anatomy_of(nn.Sequential(*layers, *(Inverted() for _ in range(DEPTH))), image())
    assert only_stream(anatomy).entry_norm is None
    assert {n.path: n.role for n in anatomy.norms}["1.1"] == "inner"


def test_a_batch_norm_on_linear_embeddings_is_an_entry_norm() -> None:
    anatomy = anatomy_of(nn.Sequential(layer(3, WIDTH, 3), *(Inverted() for _ in range(DEPTH))), image())
    assert only_stream(anatomy).entry_norm == "0.1"


def test_a_scaled_difference_from_the_mean_of_neighbours_is_a_branch() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(nn.Conv2d(3, WIDTH, 3), *(Pooled() for _ in range(DEPTH))), image()))
    assert [(b.kind, b.branch_scale.kind) for b in stream.branches] == [("conv", "channel"), ("mlp", "channel")] * DEPTH


def test_a_sum_of_linear_layers_is_one_branch_and_no_stream_of_its_own() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(nn.Conv2d(3, WIDTH, 3), *(Summed() for _ in range(DEPTH))), image()))
    assert [(b.kind, b.branch_scale.kind) for b in stream.branches] == [("conv", "channel"), ("mlp", "channel")] * DEPTH


def test_the_width_is_that_of_the_features_where_maps_become_rows_of_tokens() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(2).transpose(1, 2)
            return x + self.f(self.norm(x))  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *(Inverted() for _ in range(DEPTH)), Rows())
    stream = only_stream(anatomy_of(model, image()))
    assert (stream.depth, stream.widths, stream.feature_axis) == (DEPTH + 1, (WIDTH,), 1)
