"""Shortcuts that change shape, and skips around whole streams."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.report.overview import stream_facts
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


class Preact(nn.Module):
    """norm, activation, weights; where the width changes, shortcut and branch share norm and activation."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.read = nn.BatchNorm2d(width), nn.Conv2d(width, out, 3, padding=1)
        self.inner, self.write = nn.BatchNorm2d(out), nn.Conv2d(out, out, 3, padding=1)
        self.down = nn.Conv2d(width, out, 1) if out != width else None

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norm(x))
        skip = x if self.down is None else self.down(ready)
        return skip + self.write(F.relu(self.inner(self.read(ready))))


class Mlp(nn.Module):
    """Pre-norm; where the width changes the shortcut is projected from the norm and pooled, or pooled alone."""

    def __init__(self, width: int, out: int, pool: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, out)
        self.skip = nn.Linear(width, out) if out != width else None
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        skip = x if self.skip is None else self.skip(normed)
        branch = self.down(F.gelu(self.up(normed)))
        if self.pool:
            return F.max_pool1d(skip.transpose(1, 2), 2).transpose(1, 2) + branch[:, ::2]
        return skip + branch


class Pooled(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Mlp(WIDTH, WIDTH), Mlp(WIDTH, out, pool=True), Mlp(out, out))
        self.final = nn.LayerNorm(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.final(self.blocks(x))  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """Two stages; the second's output comes back, by a projection, to that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(Mlp(WIDTH, WIDTH), Mlp(WIDTH, WIDTH))
        self.coarse = nn.Sequential(nn.Linear(2 * WIDTH, 16), Mlp(16, 16), Mlp(16, 16))
        self.lateral, self.top, self.head = nn.Linear(WIDTH, 4), nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.top(self.coarse(fine.reshape(x.shape[0], -1, 2 * WIDTH)))
        return self.head(self.lateral(fine) + coarse.repeat_interleave(2, 1))  # type: ignore[no-any-return]


def test_a_norm_shared_by_projection_and_branch_is_the_branchs_own() -> None:
    widths = (WIDTH, 12, 12, 16)
    blocks = nn.Sequential(*(Preact(a, b) for a, b in zip(widths, (*widths[1:], 16), strict=True)))
    anatomy = anatomy_of(
        nn.Sequential(nn.Conv2d(3, WIDTH, 1), blocks, nn.BatchNorm2d(16)).eval(), torch.randn(2, 3, 6, 6)
    )
    stream = only_stream(anatomy)
    assert [b.placement for b in stream.branches] == ["preact"] * 4
    assert [b.pre_norm for b in stream.branches] == [f"1.{i}.norm" for i in range(4)]
    assert stream.final_norm == "2"


@pytest.mark.parametrize("out", [WIDTH, 12])
def test_a_pooled_shortcut_goes_on_with_the_stream(out: int) -> None:
    stream = only_stream(anatomy_of(Pooled(out), torch.randn(2, 8, WIDTH)))
    assert [(b.block, b.placement, b.pre_norm) for b in stream.branches] == [
        (f"blocks.{i}", "pre", f"blocks.{i}.norm") for i in range(3)
    ]
    assert [b.skip_scale for b in stream.branches] == [1.0, None, 1.0]
    assert stream.final_norm == "final"


def test_a_skip_around_a_stage_belongs_to_no_stream() -> None:
    fine, coarse = anatomy_of(Pyramid(), torch.randn(2, 8, WIDTH)).streams
    assert [b.block for b in fine.branches] == ["fine.0", "fine.1"]
    assert [b.block for b in coarse.branches] == ["coarse.1", "coarse.2"]


class Codes(nn.Module):
    """Residual quantisation: what is left after the nearest entry of each code book."""

    def __init__(self) -> None:
        super().__init__()
        self.books, self.blocks = nn.ModuleList(nn.Embedding(6, WIDTH) for _ in range(3)), nn.Sequential(*_mlps(2))

    def forward(self, x: Tensor) -> Tensor:
        rest = x = self.blocks(x)
        for book in self.books:
            nearest = torch.cdist(rest, book.weight[None]).argmin(-1)
            rest = rest - book(nearest)
        return x - rest


def _mlps(count: int) -> list[nn.Module]:
    return [Mlp(WIDTH, WIDTH) for _ in range(count)]


def test_an_entry_of_a_code_book_is_no_branch() -> None:
    stream = only_stream(anatomy_of(Codes(), torch.randn(2, 5, WIDTH)))
    assert [b.block for b in stream.branches] == ["blocks.0", "blocks.1"]


class Injected(nn.Module):
    """Between the blocks, features are added to some of the tokens in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.feature = nn.ModuleList(_mlps(3)), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        chosen = torch.tensor([1, 3])
        for block in self.blocks:
            x = block(x)
            x[:, chosen] = x[:, chosen] + self.feature(image)
        return x


def test_a_stream_goes_on_where_a_part_of_it_is_written_anew() -> None:
    stream = only_stream(anatomy_of(Injected(), (torch.randn(2, 5, WIDTH), torch.randn(2, 2, 3))))
    assert [b.block for b in stream.branches] == ["blocks.0", "blocks.1", "blocks.2"]


class BatchNormed(nn.Module):
    """Attention whose projection is followed by a batch norm, as convolutions are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.qkv(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        q, k, v = normed.unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_batch_norm_behind_a_projection_is_no_qk_norm() -> None:
    anatomy = anatomy_of(BatchNormed().eval(), torch.randn(2, 5, WIDTH))
    assert [site.qk_norm for site in anatomy.attention] == [None]
    assert [n.role for n in anatomy.norms] == ["inner"]


class Divided(nn.Module):
    """One branch over all tokens but the first, one over all of them, as attention divided by space and time has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch, self.whole = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Mlp(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rest = x[:, 1:] + self.branch(self.norm(x[:, 1:]))
        return self.whole(torch.cat((x[:, :1], rest), 1))  # type: ignore[no-any-return]


def test_a_stream_goes_on_where_tokens_are_put_beside_it() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Divided(), Divided()), torch.randn(2, 6, WIDTH)))
    assert [b.pre_norm for b in stream.branches] == ["0.norm", "0.whole.norm", "1.norm", "1.whole.norm"]


def test_projected_skips_and_the_widths_they_lead_to_are_said() -> None:
    model = nn.Sequential(*(Preact(*sizes) for sizes in ((4, 4), (4, 8), (8, 8), (8, 16), (16, 16))))
    report = normprobe.probe(model, torch.randn(2, 4, 6, 6), level="structure")
    stream = only_stream(report.anatomy)
    assert stream.widths == (4, 8, 16)
    assert [b.skip for b in stream.branches] == ["identity", "projection", "identity", "projection", "identity"]
    facts = stream_facts(report.anatomy, stream)
    assert "width 4–16" in facts
    assert "2 of 5 skips are projections" in facts
    assert not any("not constant" in fact for fact in facts)
