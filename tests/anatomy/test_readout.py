"""The constant factor on the logits and the soft cap; early exits; a block that runs again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import RawEnd
from tests import models
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


class Reads(nn.Module):
    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.head, self.way = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5, bias=False), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.head, self.norm(x))


@pytest.mark.parametrize(
    ("way", "multiplier", "softcap"),
    [
        (lambda head, x: head(x) / 4, 0.25, None),
        (lambda head, x: head(x / 4), 0.25, None),
        (lambda head, x: head(x * 2) / 4, 0.5, None),
        (lambda head, x: 30 * (head(x) / 30).tanh(), 1.0, 30.0),
        (lambda head, x: 30 * (head(x * 0.5) / 30).tanh(), 0.5, 30.0),
        (lambda head, x: 30 * nn.functional.hardtanh(head(x) / 30), 1.0, 30.0),
    ],
    ids=["behind", "before", "around", "capped", "scaled and capped", "clipped"],
)
def test_factor_on_the_logits(
    way: Callable[[nn.Module, Tensor], Tensor], multiplier: float, softcap: float | None
) -> None:
    head = anatomy_of(Reads(way), torch.randn(2, 3, WIDTH)).head
    assert head is not None
    assert head.logit_multiplier == pytest.approx(multiplier)
    assert head.softcap == softcap


def test_a_stream_with_norms_on_its_sums_is_not_said_to_have_none() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return x + self.f(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 5))
    (stream,) = anatomy_of(model, torch.randn(2, 3, WIDTH)).streams
    assert [b.placement for b in stream.branches] == ["post", "post", "post", "none"]
    assert stream.needs_final_norm is False
    assert stream.final_norm_reason.startswith("norms on its sums hold the stream down")


def test_the_reader_behind_which_no_norm_comes_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([x[:, :1], self.norm(x)[:, 1:]], 1))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(self.norm(x))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), Half())
    (stream,) = anatomy_of(model, torch.randn(2, 3, WIDTH)).streams
    assert (stream.final_norm, stream.needs_final_norm) == (None, True)
    assert stream.final_norm_reason == "read without a norm by 3.head"
    assert stream.raw_end == RawEnd(reader="3.head")


def test_a_function_without_a_bound_is_no_soft_cap() -> None:
    grows = Reads(lambda head, x: 30 * (head(x) / 30).clamp(-0.9, 0.9).atanh())
    head = anatomy_of(grows, torch.randn(2, 3, WIDTH)).head
    assert head is None or head.softcap is None
    scores = Reads(lambda head, x: (5 * (x @ x.mT / 5).clamp(-0.9, 0.9).atanh()).softmax(-1) @ x)
    (site,) = anatomy_of(scores, torch.randn(2, 3, WIDTH)).attention or (None,)
    assert site is None or site.softcap is None


class Block(nn.Module):
    """Two pre-norm branches of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.map = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x).mT).mT
        return x + self.map(self.norms[1](x))


class Exits(nn.Module):
    """A head behind every block; the first returned tensor is read off the first block."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), last
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(self.head(self.last(x)))
        return found


def test_the_final_norm_of_early_exits_is_read_at_the_last_one() -> None:
    stream = only_stream(anatomy_of(Exits(nn.LayerNorm(WIDTH)), torch.randn(2, 3, WIDTH)))
    assert (stream.final_norm, stream.needs_final_norm) == ("last", True)
    bare = only_stream(anatomy_of(Exits(nn.Identity()), torch.randn(2, 3, WIDTH)))
    assert (bare.final_norm, bare.needs_final_norm) == (None, None)
    assert bare.final_norm_reason.endswith("the end is read without a norm by head")


class Again(nn.Module):
    """One block, run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.head(self.last(x))  # type: ignore[no-any-return]


def test_a_block_that_runs_again_is_one_block() -> None:
    report = normprobe.probe(Again(), torch.randn(2, 3, WIDTH), level="structure")
    stream = only_stream(report.anatomy)
    assert [b.block for b in stream.branches] == ["block"] * 6
    assert "1 block run 3 times, 6 branches" in str(report)


class Adapted(nn.Module):
    """A linear layer with an update of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.down, self.up = (
            nn.Linear(WIDTH, 5),
            nn.Linear(WIDTH, 2, bias=False),
            nn.Linear(2, 5, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + 2 * self.up(self.down(x))


def test_an_update_of_low_rank_hides_no_head() -> None:
    head = anatomy_of(nn.Sequential(nn.LayerNorm(WIDTH), Adapted()), torch.randn(2, 3, WIDTH)).head
    assert head is not None
    assert (head.path, head.logit_multiplier) == ("1.whole.weight", 1.0)


def test_a_stream_that_is_returned_raw_is_left_to_its_reader() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(self.norm(x).relu())  # type: ignore[no-any-return]

    report = normprobe.probe(nn.Sequential(Block(), Block()), torch.randn(2, 3, WIDTH), level="structure")
    assert only_stream(report.anatomy).raw_end == RawEnd(reader="output", returned=True)
    assert [(f.code, f.severity.value) for f in report.findings] == [("NP201", "note")]


POOLED = {
    "mean of maps": nn.AdaptiveAvgPool2d(1),
    "largest of maps": nn.AdaptiveMaxPool2d(1),
    "mean of rows": nn.Sequential(nn.Flatten(2), nn.AdaptiveAvgPool1d(1)),
    "largest of rows": nn.Sequential(nn.Flatten(2), nn.AdaptiveMaxPool1d(1)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
@pytest.mark.parametrize("pool", POOLED)
def test_a_pooling_before_the_final_norm_is_no_layer(pool: str, layout: torch.memory_format) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(1, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(self.norm(x))

    maps = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), Block(), Block())
    model = nn.Sequential(maps, POOLED[pool], nn.Flatten(1), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    model, x = model.to(memory_format=layout), torch.randn(2, 3, 16, 16).to(memory_format=layout)  # type: ignore[call-overload]
    stream = only_stream(anatomy_of(model, x))
    assert (stream.final_norm, stream.needs_final_norm) == ("3", True)


def test_a_kernel_over_one_place_is_a_head() -> None:
    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled = self.norm(self.stem(x)).relu().mean((2, 3), keepdim=True)
            return self.head(pooled).flatten(1)  # type: ignore[no-any-return]

    head = anatomy_of(Maps(), torch.randn(2, 3, 8, 8)).head
    assert head is not None
    assert head.path == "head.weight"


def test_a_norm_behind_the_final_norm_belongs_to_the_head() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)),
            )
            self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
            self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.transform(self.final(x + self.mlp(self.norm(x)))))  # type: ignore[no-any-return]

    roles = {norm.path: norm.role for norm in anatomy_of(Masked(), torch.randn(2, 3, WIDTH)).norms}
    assert roles == {"norm": "pre", "final": "final", "transform.2": "head"}


class Classifier(nn.Module):
    """Blocks, and a head that reads what `way` makes of the raw stream."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.entry, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head, self.way = nn.Linear(WIDTH, 5), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.way(x))


@pytest.mark.parametrize(
    ("way", "pooled"),
    [
        (lambda x: x, False),
        (lambda x: x[:, 0], False),
        (lambda x: x.mean(1), True),
        (lambda x: x[:, 1:].sum(1) / 3, True),
        (lambda x: nn.functional.adaptive_avg_pool1d(x.mT, 1).flatten(1), True),
        (lambda x: torch.cat([x[:, :1], x.mean(1, keepdim=True)], 1), False),
    ],
    ids=["each token", "first token", "mean", "sum", "pool", "first token and mean"],
)
def test_a_head_that_reads_a_pool_alone_is_told(way: Callable[[Tensor], Tensor], pooled: bool) -> None:
    stream = only_stream(anatomy_of(Classifier(way), torch.randn(2, 4, WIDTH)))
    assert stream.raw_end == RawEnd(reader="head", pooled=pooled)


class Two(nn.Module):
    """Two networks side by side; the second one's final norm is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, _ = models.decoder("pre", layers=3)
        self.second, _ = models.decoder("pre", layers=3, final=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_a_network_that_the_first_output_does_not_hang_on_is_judged_by_its_own() -> None:
    first, second = anatomy_of(Two(), models.decoder("pre", layers=3)[1]).streams
    assert first.final_norm == "first.final"
    assert (second.needs_final_norm, second.final_norm) == (True, None)
    assert second.raw_end is not None
    assert second.raw_end.reader == "second.head"
