"""NP309: equal blocks that all leave out the same skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.records import Branch, Finding, Stream
from tests.checks import builders as b
from tests.checks.placement.planted import found, judge

WIDTH, BLOCKS = 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))
        return y


class Block(nn.Module):
    """A block of which `which` parts have a skip, each normed at its input, and at its output where `sandwich`."""

    def __init__(self, norm: Callable[[int], nn.Module], skips: tuple[bool, bool], sandwich: bool = False) -> None:
        super().__init__()
        self.norms, self.skips = nn.ModuleList(norm(WIDTH) for _ in range(2)), skips
        self.after = nn.ModuleList(norm(WIDTH) if sandwich else nn.Identity() for _ in range(2))
        mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.parts = nn.ModuleList([Attention(), mlp])

    def forward(self, x: Tensor) -> Tensor:
        for norm, part, after, skip in zip(self.norms, self.parts, self.after, self.skips, strict=True):
            y = after(part(norm(x)))
            x = x + y if skip else y
        return x


def stack(*blocks: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)), torch.randn(1, 6, WIDTH)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(
    ("skips", "kind", "last"), [((True, False), "attention", "0.parts.1.2"), ((False, True), "mlp", "1.parts.0.o")]
)
def test_a_skip_that_every_block_leaves_out(
    norm: Callable[[int], nn.Module], skips: tuple[bool, bool], kind: str, last: str
) -> None:
    (finding,) = found("NP309", *stack(*(Block(norm, skips) for _ in range(BLOCKS))))
    assert (finding.severity.value, finding.where, len(finding.places)) == ("warning", "0", BLOCKS)
    assert f"behind the {kind} branch of each of {BLOCKS} equal blocks" in finding.message
    assert f"by the weights of {last} behind" in finding.message


def test_a_sandwich_without_the_skip() -> None:
    (finding,) = found("NP309", *stack(*(Block(nn.LayerNorm, (True, False), sandwich=True) for _ in range(BLOCKS))))
    assert len(finding.places) == BLOCKS


def test_all_skips_or_none() -> None:
    for skips in ((True, True), (False, False)):
        assert found("NP309", *stack(*(Block(nn.LayerNorm, skips) for _ in range(BLOCKS)))) == ()


class Larger(Block):
    """A block whose last part meets the trunk in a maximum, which is no sum and lets the trunk pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.parts[0](self.norms[0](x))
        return torch.maximum(x, self.parts[1](self.norms[1](x)))


def test_another_way_past_the_weights_is_no_finding() -> None:
    assert found("NP309", *stack(*(Larger(nn.LayerNorm, (True, True)) for _ in range(BLOCKS)))) == ()


class Around(nn.Module):
    """A skip past the whole of what lacks one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def test_a_skip_around_each_block_goes_past_them() -> None:
    assert found("NP309", *stack(*(Around(Block(nn.LayerNorm, (True, False))) for _ in range(BLOCKS)))) == ()


class Stage(nn.Module):
    """One block, and a projection to the next stage that is normed and has no skip, outside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(nn.LayerNorm, (True, True))])
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.blocks[0](x)))  # type: ignore[no-any-return]


def test_stages_of_a_hierarchy_are_no_equal_blocks() -> None:
    assert found("NP309", *stack(*(Stage() for _ in range(BLOCKS)))) == ()


class Merging(Block):
    """A block that ends in a normed map from the features of two tokens to those of one, of the same width."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm, (True, True))
        self.norm, self.merge = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(super().forward(x))
        return self.merge(x.unflatten(1, (-1, 2)).flatten(2))  # type: ignore[no-any-return]


def test_blocks_that_merge_tokens_could_have_no_skip() -> None:
    model, _ = stack(*(Merging() for _ in range(BLOCKS)))
    assert found("NP309", model, torch.randn(1, 2**BLOCKS, WIDTH)) == ()


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize(
    ("odd", "skips"),  # nothing comes before the first branch of all that could go past it
    [(0, (True, False)), *((odd, s) for odd in (1, 3) for s in ((True, False), (False, True), (False, False)))],
)
def test_one_block_that_leaves_out_a_skip(odd: int, skips: tuple[bool, bool], sandwich: bool) -> None:
    blocks = [Block(nn.LayerNorm, (True, True), sandwich) for _ in range(4)]
    blocks[odd].skips = skips
    (finding,) = found("NP309", *stack(*blocks))
    assert (finding.severity.value, finding.where) == ("warning", str(odd))
    kind, norm = ("attention", 0) if not skips[0] else ("mlp", 1)
    assert f"what follows norms.{norm} is not added to the stream" in finding.message
    assert f"in 3 equal blocks a skip goes past the {kind} branch" in finding.message


def test_where_half_of_the_blocks_leave_it_out_nothing_is_said() -> None:
    blocks = [Block(nn.LayerNorm, (True, i % 2 == 0)) for i in range(4)]
    assert found("NP309", *stack(*blocks)) == ()


def inner(block: str, part: str) -> Branch:
    """A branch of a block whose parts hold a norm and weights each."""
    return b.branch(block, pre_norm=f"b.{block[2]}.{part}.n", writers=(f"b.{block[2]}.{part}.w",))


def test_other_parts_of_the_same_block_are_no_equal_blocks() -> None:
    rest = tuple(inner(f"b.{i}", part) for i in (1, 2) for part in ("mix", "think"))
    first = b.stream(branches=(inner("b.0.mix", "mix"),), final_norm="b.0.think.n", unskipped=("b.0.think.w",))
    ((finding,), _) = judge("NP309", b.document(streams=(first, b.stream(branches=rest, final_norm="n"))))
    assert (finding.where, finding.value) == ("b.0", "b.0.think.n")
    added = b.stream(branches=(*rest, inner("b.0.think", "think")), final_norm="n")
    assert judge("NP309", b.document(streams=(first, added)))[0] == ()


class Mixing(nn.Module):
    """ConvMixer's block: a skip past the convolution over places, none past the one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.channels = nn.Conv1d(WIDTH, WIDTH, 1)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[0](F.gelu(self.places(x)))
        return self.norms[1](F.gelu(self.channels(x)))  # type: ignore[no-any-return]


def test_a_published_block_of_convolutions_is_sound() -> None:
    model = nn.Sequential(*(Mixing() for _ in range(BLOCKS)), nn.Flatten(), nn.Linear(6 * WIDTH, 4)).eval()
    assert found("NP309", model, torch.randn(2, WIDTH, 6)) == ()


def broken(*changes: dict[str, Any]) -> tuple[Stream, ...]:
    """A stream for each dictionary, one block each, going on in the next without a skip."""
    made = []
    for i, change in enumerate(changes):
        path = f"blocks.{i}"
        facts = {"name": "blocks", "depth": 1, "final_norm": f"{path}.n2", "unskipped": (f"{path}.down.weight",)}
        made.append(b.stream(**{**facts, "branches": (b.branch(path),)} | change))
    return tuple(made)


def found_in(*changes: dict[str, Any]) -> tuple[Finding, ...]:
    return judge("NP309", b.document(streams=broken(*changes)))[0]


def test_three_equal_blocks_are_needed() -> None:
    assert len(found_in({}, {}, {"unskipped": ()})) == 1
    assert found_in({}, {}) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"unskipped": ()},
        {"unskipped": ("down.weight",)},
        {"width": 9},
        {"final_norm": None},
        {"branches": (b.branch("blocks.1", kind="conv"),)},
        {"branches": (b.branch("blocks.1", placement="post"),)},
        {"branches": (b.branch("blocks.1"), b.branch("blocks.9"))},
        {"branches": (b.branch("others.1"),)},
        {"branches": (b.branch("blocks.0"),)},
    ],
    ids=str,
)
def test_one_that_differs_breaks_the_row(change: dict[str, Any]) -> None:
    assert found_in({}, change, {}) == ()


@pytest.mark.parametrize("facts", [{"kind": "conv"}, {"kind": "other"}, {"placement": "none"}, {"placement": "post"}])
def test_rows_of_other_branches_are_not_judged(facts: dict[str, Any]) -> None:
    assert found_in(*({"branches": (b.branch(f"blocks.{i}", **facts),)} for i in range(4))) == ()


def test_without_a_stream_it_is_skipped() -> None:
    assert judge("NP309", b.document(streams=()))[1][0].why == "no residual stream was found"
    assert normprobe.checks.find("NP309").severity.value == "warning"


class Listed(nn.Module):
    """Layers in lists by kind, in one forward; `lacking` has no skip past its attention, or past its MLP."""

    def __init__(self, lacking: int | None, past: int = 0) -> None:
        super().__init__()
        parts = [Block(nn.LayerNorm, (True, True)) for _ in range(BLOCKS)]
        self.norms, self.attention = nn.ModuleList(p.norms for p in parts), nn.ModuleList(p.parts[0] for p in parts)
        self.mlp, self.lacking, self.past = nn.ModuleList(p.parts[1] for p in parts), lacking, past

    def forward(self, x: Tensor) -> Tensor:
        for i, (norms, *parts) in enumerate(zip(self.norms, self.attention, self.mlp, strict=True)):
            for j, (norm, part) in enumerate(zip(norms, parts, strict=True)):
                lost = (i, j) == (self.lacking, self.past)
                x = part(norm(x)) if lost else x + part(norm(x))
        return x


@pytest.mark.parametrize("lacking", [1, 2])
@pytest.mark.parametrize(("past", "kind"), [(0, "attention"), (1, "mlp")])
def test_one_layer_of_lists_that_lacks_a_skip(lacking: int, past: int, kind: str) -> None:
    (finding,) = found("NP309", *stack(nn.Linear(WIDTH, WIDTH), Listed(lacking, past)))
    assert (finding.severity.value, finding.where) == ("warning", f"1.norms.{lacking}.{past}")
    assert f"{kind} branches, one before or behind each of the others" in finding.message


def test_a_norm_of_another_name_is_known_by_what_follows() -> None:
    class Renamed(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0](self.input_norm(x))
            return x + self.parts[1](self.norms[1](x))

    odd = Renamed(nn.LayerNorm, (False, True))
    odd.input_norm = nn.LayerNorm(WIDTH)
    blocks = [Block(nn.LayerNorm, (True, True)) for _ in range(BLOCKS)]
    blocks[2] = odd
    (finding,) = found("NP309", *stack(nn.Linear(WIDTH, WIDTH), *blocks))
    assert finding.where == "3.input_norm"


def test_a_map_between_two_towers_is_no_gap() -> None:
    between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    assert found("NP309", *stack(nn.Linear(WIDTH, WIDTH), Listed(None))) == ()
    assert found("NP309", *stack(nn.Linear(WIDTH, WIDTH), Listed(None), between, Listed(None))) == ()
