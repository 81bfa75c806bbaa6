"""Blocks that end in a norm of their own, streams that lead into other streams, mixers and MLPs over maps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Macaron(nn.Module):
    """Two pre-norm branches, then a norm on the sum, and with `twice` another one behind it."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.end = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.first, self.second = mlp(), mlp()
        self.last = nn.LayerNorm(WIDTH) if twice else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(self.norm1(x))
        return self.last(self.end(x + 0.5 * self.second(self.norm2(x))))  # type: ignore[no-any-return]


def test_the_last_block_ends_in_its_own_norm_as_the_others_do() -> None:
    for twice in (False, True):
        stream = only_stream(anatomy_of(nn.Sequential(*(Macaron(twice) for _ in range(3))), torch.randn(2, 5, WIDTH)))
        assert [b.placement for b in stream.branches] == ["pre", "post"] * 3
        assert [b.post_norm for b in stream.branches[1::2]] == ["0.end", "1.end", "2.end"]
        assert stream.final_norm == ("2.last" if twice else None)


class Post(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.branch, self.norm = mlp(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.branch(x))  # type: ignore[no-any-return]


class Pre(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))  # type: ignore[no-any-return]


def test_a_stream_that_leads_into_another_takes_no_norm_from_it() -> None:
    stages = nn.Sequential(Pre(), Pre(), nn.Linear(WIDTH, 12), Post(12), Post(12))
    anatomy = anatomy_of(stages, torch.randn(2, 5, WIDTH))
    first, _ = anatomy.streams
    assert (first.final_norm, first.needs_final_norm) == (None, None)
    assert first.final_norm_reason == "the stream .#2 goes on from it"
    assert {n.path: n.role for n in anatomy.norms}["3.norm"] == "post"


def test_a_stage_whose_end_is_projected_raw_needs_no_norm_of_its_own() -> None:
    stages = nn.Sequential(Pre(), Pre(), nn.Linear(WIDTH, 12), Pre(12), Pre(12))
    first, second = anatomy_of(stages, torch.randn(2, 5, WIDTH)).streams
    assert (first.final_norm, first.needs_final_norm) == (None, None)
    assert (second.final_norm, second.needs_final_norm) == (None, True)


class Pooling(nn.Module):
    """A mixer without weights (the mean of the neighbours), and an MLP of convolutions over one position."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, WIDTH), nn.GroupNorm(1, WIDTH)
        self.mlp = nn.Sequential(nn.Conv2d(WIDTH, 16, 1), nn.GELU(), nn.Conv2d(16, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + (F.avg_pool2d(h, 3, 1, 1, count_include_pad=False) - h)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def test_a_sliding_mean_is_a_mixer_and_convolutions_over_one_position_are_an_mlp() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Pooling(), Pooling()), torch.randn(2, WIDTH, 6, 6)))
    assert [(b.kind, b.placement, b.pre_norm) for b in stream.branches] == [
        (kind, "pre", f"{i}.{norm}") for i in range(2) for kind, norm in (("conv", "norm1"), ("mlp", "norm2"))
    ]


class Trend(nn.Module):
    """Post-norm, after which the sliding mean is taken off: a filter of the trunk, no branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.branch(x))
        return x - F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


def test_taking_a_sliding_mean_off_is_no_branch_and_leaves_the_trunk_whole() -> None:
    branches = only_stream(anatomy_of(nn.Sequential(Trend(), Trend()), torch.randn(2, 6, WIDTH))).branches
    assert [(b.block, b.kind, b.placement) for b in branches] == [("0", "mlp", "post"), ("1", "mlp", "post")]


class Edges(nn.Module):
    """What the mean of the neighbours leaves of the normed stream, with weights behind it or without."""

    def __init__(self, last: nn.Module, sign: float = 1.0) -> None:
        super().__init__()
        self.norm, self.last, self.sign = nn.GroupNorm(1, WIDTH), last, sign

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        low = F.avg_pool2d(h, 3, 1, 1, count_include_pad=False)
        return x + self.last(h - low if self.sign > 0 else low - h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("weights", [True, False])
def test_what_a_branch_takes_a_sliding_mean_off_mixes_neighbours(weights: bool, sign: float) -> None:
    blocks = [Edges(nn.Conv2d(WIDTH, WIDTH, 1) if weights else nn.Identity(), sign) for _ in range(2)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH * 36, 5))
    model = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), *blocks, nn.GroupNorm(1, WIDTH), head)
    branches = only_stream(anatomy_of(model, torch.randn(2, WIDTH, 6, 6))).branches
    assert [(b.kind, b.placement) for b in branches] == [("conv", "pre")] * 2


class Inverted(nn.Module):
    """Expand, mix, project, each with its norm; without a skip where the width changes."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.expand, self.bn1 = nn.Conv2d(inside, 2 * inside, 1, bias=False), nn.BatchNorm2d(2 * inside)
        self.project, self.bn2 = nn.Conv2d(2 * inside, outside, 1, bias=False), nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.project(self.bn1(self.expand(x)).relu()))
        return x + y if x.shape == y.shape else y


def test_the_norm_inside_a_block_without_a_skip_is_no_final_norm() -> None:
    blocks = [Inverted(3, 8), Inverted(8, 8), Inverted(8, 8), Inverted(8, 12)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(12 * 36, 5))
    report = normprobe.probe(nn.Sequential(*blocks, head).eval(), torch.randn(2, 3, 6, 6), level="structure")
    stream = only_stream(report.anatomy)
    assert (stream.final_norm, stream.needs_final_norm) == (None, False)
    assert "final" not in {n.role for n in report.anatomy.norms}
    assert not report.findings


class NormedBetween(nn.Module):
    """The sum of the first branch is normed, that of the second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.norm, self.f = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mlp()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.mix(self.pre(x).transpose(1, 2)).transpose(1, 2))
        return x + self.f(x)  # type: ignore[no-any-return]


def test_whether_the_last_sum_is_normed_is_told_by_the_sums_of_its_kind() -> None:
    blocks = [NormedBetween() for _ in range(3)]
    model = nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    anatomy = anatomy_of(model, torch.randn(2, 6, WIDTH))
    stream = only_stream(anatomy)
    assert [b.placement for b in stream.branches] == ["post", "none"] * 3
    assert stream.final_norm == "3"
    assert {n.path: n.role for n in anatomy.norms}["3"] == "final"


class Bottleneck(nn.Module):
    """A post-norm skip around a narrow post-norm stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner = nn.Linear(WIDTH, 4), nn.Sequential(Post(4), Post(4))
        self.back, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.back(self.inner(self.into(x))))  # type: ignore[no-any-return]


def test_the_norm_on_a_skip_around_a_stream_is_post() -> None:
    stages = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Bottleneck() for _ in range(3)))
    anatomy = anatomy_of(stages, torch.randn(2, 5, WIDTH))
    assert {n.path: n.role for n in anatomy.norms if n.size == WIDTH} == {f"{i}.norm": "post" for i in (1, 2, 3)}
    assert [s.entry_norm for s in anatomy.streams] == [None] * 3


class Narrowing(Post):
    """The skip is projected as well."""

    def __init__(self) -> None:
        super().__init__()
        self.branch[-1], self.norm = nn.Linear(2 * WIDTH, 4), nn.LayerNorm(4)
        self.skip = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.skip(x) + self.branch(x))  # type: ignore[no-any-return]


def test_a_projected_skip_is_no_scaled_trunk() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Narrowing(), Post(4), Post(4)), torch.randn(2, 5, WIDTH)))
    assert [(b.skip, b.placement) for b in stream.branches] == [("projection", "post"), *[("identity", "post")] * 2]
