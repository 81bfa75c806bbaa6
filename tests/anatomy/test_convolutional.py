"""Convolutional networks: gated branches, projected shortcuts, maps of one pixel, stages of one block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


def image(size: int = 8) -> Tensor:
    return torch.randn(2, WIDTH, size, size, generator=torch.Generator().manual_seed(0))


def conv(inputs: int = WIDTH, outputs: int = WIDTH, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SqueezedBlock(nn.Module):
    """ResNet's block with squeeze and excitation behind the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1, self.conv2, self.norm2 = conv(), nn.BatchNorm2d(WIDTH), conv(), nn.BatchNorm2d(WIDTH)
        self.down, self.up = nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(4, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        gate = self.up(F.relu(self.down(h.mean((2, 3), keepdim=True)))).sigmoid()
        return F.relu(x + h * gate.expand_as(h))


def test_a_gate_for_each_channel_hides_neither_the_norm_nor_the_width() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(SqueezedBlock(), SqueezedBlock()).eval(), image()))
    assert (stream.width, stream.feature_axis) == (WIDTH, 1)
    for block, branch in zip("01", stream.branches, strict=True):
        assert (branch.placement, branch.output_norm) == ("postact", f"{block}.norm2")
        assert branch.writers == (f"{block}.conv2.weight",)


class PreactBlock(nn.Module):
    """A preact block; where it changes the shape, the shortcut pools and projects what norm and activation made."""

    def __init__(self, inputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(WIDTH)
        self.conv1, self.conv2 = conv(inputs, stride=stride), conv()
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), conv(inputs, kernel=1)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        skip = x if self.shortcut is None else self.shortcut(h)
        return skip + self.conv2(F.relu(self.norm2(self.conv1(h))))


def test_a_pooled_and_projected_shortcut_goes_on_with_the_stream() -> None:
    strides = (1, 2, 1, 2, 1)
    blocks = nn.Sequential(*(PreactBlock(WIDTH, stride) for stride in strides), nn.BatchNorm2d(WIDTH), nn.ReLU())
    stream = only_stream(anatomy_of(blocks.eval(), image()))
    assert [b.placement for b in stream.branches] == ["preact"] * 5
    assert [b.pre_norm for b in stream.branches] == [f"{i}.norm1" for i in range(5)]
    assert [b.skip_scale for b in stream.branches] == [1.0, None, 1.0, None, 1.0]
    assert stream.final_norm == "5"


def test_a_map_of_one_pixel_tells_what_is_reduced() -> None:
    model = nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1), ChannelNorm(WIDTH), conv(kernel=1), nn.BatchNorm2d(WIDTH))
    anatomy = anatomy_of(model.eval(), image())
    assert [(n.path, n.kind) for n in anatomy.norms] == [("2", "layernorm"), ("4", "batchnorm")]


class Stage(nn.Module):
    """One block with a norm inside its branch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.up, self.down = conv(), ChannelNorm(WIDTH), conv(WIDTH, 16, 1), conv(16, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.mix(x)))))


def test_the_norm_behind_a_stage_of_one_block_is_its_final_norm() -> None:
    shrink = (ChannelNorm(WIDTH), conv(kernel=3, stride=2))
    anatomy = anatomy_of(nn.Sequential(Stage(), *shrink, Stage(), ChannelNorm(WIDTH)), image())
    assert [(s.placement, s.final_norm) for s in anatomy.streams] == [("none", "1"), ("none", "4")]


class MapBlock(nn.Module):
    """Attention and MLP on a map, written with convolutions of one pixel; batch norm behind every projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.qkv_norm = conv(WIDTH, 3 * WIDTH, 1), nn.BatchNorm2d(3 * WIDTH)
        self.out, self.out_norm = conv(kernel=1), nn.BatchNorm2d(WIDTH)
        self.up, self.down, self.down_norm = conv(WIDTH, 16, 1), conv(16, WIDTH, 1), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_norm(self.qkv(x)).view(2, 3, 2, WIDTH // 2, -1).transpose(-2, -1).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-2, -1).reshape(x.shape)
        x = x + self.out_norm(self.out(mixed))
        return x + self.down_norm(self.down(F.gelu(self.up(x))))


def test_convolutions_of_one_pixel_mix_channels_and_a_batch_norm_is_no_qk_norm() -> None:
    anatomy = anatomy_of(nn.Sequential(MapBlock(), MapBlock()).eval(), image(4))
    branches = only_stream(anatomy).branches
    assert [(b.kind, b.placement) for b in branches] == [("attention", "output"), ("mlp", "output")] * 2
    assert [site.qk_norm for site in anatomy.attention] == [None, None]


class TwoHeads(nn.Module):
    """A pre-norm stack that two heads read, each through its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (self.heads[0](x) + self.heads[1](x)) / 2


def test_heads_with_a_norm_each_have_a_final_norm() -> None:
    stream = only_stream(anatomy_of(TwoHeads(), torch.randn(2, 3, WIDTH)))
    assert (stream.final_norm, stream.needs_final_norm) == ("heads.0.0", True)


class PoolBlock(nn.Module):
    """PoolFormer's block: the mean over neighbours less the signal itself mixes tokens without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, WIDTH), nn.GroupNorm(1, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1, 1))
        self.up, self.down = conv(WIDTH, 16, 1), conv(16, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + (F.avg_pool2d(h, 3, 1, 1, count_include_pad=False) - h) * self.scale
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_a_pool_that_keeps_the_shape_is_a_branch() -> None:
    anatomy = anatomy_of(nn.Sequential(PoolBlock(), PoolBlock(), nn.GroupNorm(1, WIDTH)), image())
    branches = only_stream(anatomy).branches
    assert [(b.kind, b.placement) for b in branches] == [("conv", "pre"), ("mlp", "pre")] * 2
    assert [n.role for n in anatomy.norms] == ["pre"] * 4 + ["final"]


class ManyWidths(nn.Module):
    """Convolutions of two widths side by side, as they are trained before they are merged into one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = conv(), conv(kernel=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + (self.norms[0](self.wide(x)) + self.norms[1](self.narrow(x))))


def test_linear_summands_are_one_branch() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(ManyWidths(), ManyWidths()).eval(), image()))
    assert [(b.kind, b.parallel, b.placement) for b in stream.branches] == [("conv", False, "postact")] * 2


class Shrinking(nn.Module):
    """A pre-norm block; where the width changes, the shortcut is the largest of the projected neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(inputs), nn.LayerNorm(outputs)
        self.qkv, self.out = nn.Linear(inputs, 3 * outputs), nn.Linear(outputs, outputs)
        self.proj = nn.Linear(inputs, outputs) if inputs != outputs else None
        self.mlp = nn.Sequential(nn.Linear(outputs, 32), nn.GELU(), nn.Linear(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        if self.proj is not None:
            x, q = (t.unflatten(1, (-1, 2)).amax(2) for t in (self.proj(h), q))
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return x + self.mlp(self.norm2(x))


def test_the_norm_that_a_projected_shortcut_reads_belongs_to_its_own_block() -> None:
    sizes = ((8, 8), (8, 16), (16, 16), (16, 24))
    model = nn.Sequential(*(Shrinking(*size) for size in sizes), nn.LayerNorm(24))
    stream = only_stream(anatomy_of(model, torch.randn(2, 8, 8)))
    assert [(b.kind, b.placement) for b in stream.branches] == [("attention", "pre"), ("mlp", "pre")] * 4
    assert stream.final_norm == "4"


class Darknet(nn.Module):
    """Blocks whose batch norm sizes what they write, and a head that reads their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(), nn.BatchNorm2d(WIDTH), nn.ReLU(), conv(), nn.BatchNorm2d(WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def test_batch_norms_on_what_is_written_need_no_final_norm() -> None:
    stream = only_stream(anatomy_of(Darknet().eval(), image()))
    assert (stream.placement, stream.final_norm, stream.needs_final_norm) == ("output", None, False)
