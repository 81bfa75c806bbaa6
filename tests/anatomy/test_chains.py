"""Which sums make a stream: branches without weights, sums inside a branch, norms on the sums, kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
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


class Macaron(nn.Module):
    """Three pre-norm branches, and a norm at the block's end."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.first, self.last = (nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(2))
        self.conv, self.out = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norms[0](x)) / 2
        x = x + self.conv(self.norms[1](x).mT).mT
        return self.out(x + self.last(self.norms[2](x)) / 2)


def test_norm_at_the_end_of_every_block_is_no_final_norm() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Macaron(), Macaron()), torch.randn(2, 5, WIDTH)))
    assert [b.placement for b in stream.branches] == ["pre", "pre", "post"] * 2
    assert (stream.final_norm, stream.needs_final_norm) == (None, False)


def test_convolutions_of_one_position_are_an_mlp() -> None:
    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 16, 1, groups=2)
            self.down = nn.Conv1d(16, WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(self.norm(x).mT).relu()).mT

    stream = only_stream(anatomy_of(nn.Sequential(Pointwise(), Pointwise()), torch.randn(2, 5, WIDTH)))
    assert [b.kind for b in stream.branches] == ["mlp", "mlp"]


class Attention(nn.Module):
    """Post-norm attention of `x` over `states`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.norm = linear(), linear(), linear(), linear(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(self.q(x), self.k(states), self.v(states))
        return self.norm(x + self.o(attended))


def test_pooled_queries_over_the_stream_before_are_self_attention() -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = Attention(), Attention(), linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x, x)
            pooled = F.avg_pool1d(torch.cat([x[:, :1], x], 1).mT, 2).mT
            return self.head(self.second(pooled, x))

    anatomy = anatomy_of(Pooling(), torch.randn(2, 5, WIDTH))
    assert [b.kind for s in anatomy.streams for b in s.branches] == ["attention", "attention"]
    assert [site.cross for site in anatomy.attention] == [False, False]


def test_a_second_norm_on_the_sum_leaves_the_first_on_the_stream() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(linear(), nn.GELU(), linear())
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x + self.mlp(x)))

    stream = only_stream(anatomy_of(nn.Sequential(Doubled(), Doubled()), torch.randn(2, 5, WIDTH)))
    assert [(b.placement, b.post_norm) for b in stream.branches] == [("post", "0.first"), ("post", "1.first")]


def test_a_single_block_holds_its_branches() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Both()), torch.randn(2, 5, WIDTH)))
    assert [(b.kind, b.block) for b in stream.branches] == [("attention", "0"), ("mlp", "0")]


class Both(nn.Module):
    """One pre-norm block; both adds run in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.ModuleList()
        self.norms.extend(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(linear(), nn.GELU(), linear())

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h)[0]
        return x + self.mlp(self.norms[1](x))


def test_branch_beside_a_post_norm_block_goes_on_with_the_stream() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Fourier() for _ in range(2))
            self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            conv = self.conv(x.mT).mT
            return self.layers[1](self.norm(self.layers[0](x) + conv))

    stream = only_stream(anatomy_of(nn.Sequential(linear(), Beside()), torch.randn(2, 5, WIDTH)))
    assert [(b.kind, b.placement) for b in stream.branches] == [
        (kind, "post") for kind in ("other", "mlp", "conv", "other", "mlp")
    ]
    assert [b.skip_scale for b in stream.branches] == [1.0] * 5


def test_two_norms_that_read_the_last_sum_are_not_on_the_stream() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.mlp = nn.Sequential(Macaron(), Macaron()), nn.Sequential(linear(), nn.GELU(), linear())
            self.norms, self.gate, self.out = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(x)
            x = x + self.mlp(x)
            return self.out(self.norms[0](x)) * self.gate(self.norms[1](x)).sigmoid()

    stream = only_stream(anatomy_of(Adapted(), torch.randn(2, 5, WIDTH)))
    assert [b.placement for b in stream.branches] == ["pre", "pre", "post"] * 2 + ["none"]


def test_step_towards_a_branch_is_one_write() -> None:
    class Towards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.out = nn.Sequential(linear(), nn.GELU(), linear()), nn.LayerNorm(WIDTH)
            self.rate = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.rate * (self.out(self.mlp(x)) - x)

    stream = only_stream(anatomy_of(nn.Sequential(linear(), Towards(), Towards()), torch.randn(2, 5, WIDTH)))
    found = [(b.placement, b.skip_scale, b.branch_scale.kind) for b in stream.branches]
    assert found == [("output", None, "channel")] * 2


class ValuesKept(nn.Module):
    """Attention alone, whose layers mix values of earlier layers into their own (Zhou et al. 2024)."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor], first: bool) -> None:
        super().__init__()
        self.mix, self.first = mix, first
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, n * WIDTH) for _ in range(4)) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        kept = None
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            q, k, value = qkv(norm(x)).chunk(3, -1)
            v = value if kept is None else self.mix(value, kept)
            kept = v if kept is None or not self.first else kept
            x = x + out(F.scaled_dot_product_attention(q, k, v))
        return x


@pytest.mark.parametrize("first", [True, False], ids=["of the first layer", "of the layer before"])
@pytest.mark.parametrize(
    "mix",
    [torch.add, lambda v, kept: (v + kept) / 2, lambda v, kept: v + 0.5 * (kept - v)],
    ids=["sum", "mean", "lerp"],
)
def test_values_that_are_kept_for_later_layers_are_no_stream(
    mix: Callable[[Tensor, Tensor], Tensor], first: bool
) -> None:
    stream = only_stream(anatomy_of(ValuesKept(mix, first), torch.randn(2, 5, WIDTH)))
    assert [(b.kind, b.placement, b.parallel) for b in stream.branches] == [("attention", "pre", False)] * 4


class BiasShared(nn.Module):
    """Attention whose layers all add one table, computed from a second input, to their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, n * WIDTH) for _ in range(4)) for n in (3, 1))
        self.mlps = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear()) for _ in range(4))
        self.table = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        bias = self.table(places)
        for norm, qkv, out, mlp in zip(self.norms, self.qkv, self.out, self.mlps, strict=True):
            q, k, v = qkv(norm(x)).chunk(3, -1)
            x = x + out((q @ k.transpose(1, 2) + bias).softmax(-1) @ v)
            x = x + mlp(x)
        return x


def test_a_table_that_is_added_to_all_logits_is_no_stream() -> None:
    anatomy = anatomy_of(BiasShared(), (torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)))
    assert [(b.kind, b.placement) for b in only_stream(anatomy).branches] == [("attention", "pre"), ("mlp", "pre")] * 4
