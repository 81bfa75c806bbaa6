"""Skips and norms that let the signal through and no gradient: NP309 and NP606 at level "backward"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.records import Finding
from tests.checks import builders as b
from tests.checks.placement.planted import judge
from tests.plain import INPUT, LAYERS, Plain

WIDTH, BLOCKS = 16, 4


def detached(x: Tensor) -> Tensor:
    return x.detach()


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


def whole(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """Attention and an MLP, pre-norm or post-norm; what the skips and norms give is handed on by these functions."""

    def __init__(self, pre: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.pre, self.skips, self.normed, self.written = pre, [whole, whole], [whole, whole], whole

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def think(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch, skip, hand in zip(
            self.norms, (self.attend, self.think), self.skips, self.normed, strict=True
        ):
            y = self.written(branch(hand(norm(x)) if self.pre else x))
            x = skip(x) + y
            x = x if self.pre else norm(x)
        return x


def said(blocks: list[Block], code: str) -> list[Finding]:
    torch.manual_seed(0)
    last = nn.LayerNorm(WIDTH) if blocks[0].pre else nn.Identity()
    model = nn.Sequential(nn.Embedding(32, WIDTH), *blocks, last, nn.Linear(WIDTH, 32)).eval()
    report = normprobe.probe(model, torch.randint(0, 32, (2, 7)), level="backward")
    return [f for f in report.findings if f.code == code]


@pytest.mark.parametrize("cut", [detached, without_gradients])
@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize(("odd", "which"), [(0, 0), (1, 1), (3, 0)])
def test_a_skip_that_is_detached(odd: int, which: int, pre: bool, cut: Callable[[Tensor], Tensor]) -> None:
    blocks = [Block(pre) for _ in range(BLOCKS)]
    blocks[odd].skips[which] = cut
    (finding,) = said(blocks, "NP309")
    assert (finding.severity.value, finding.where, finding.value) == ("warning", str(odd + 1), 1.0)
    assert f"past the {('attention', 'mlp')[which]} branch is detached (1 of 8 adds)" in finding.message


@pytest.mark.parametrize("pre", [True, False])
def test_sound_skips_and_norms(pre: bool) -> None:
    for code in ("NP309", "NP606"):
        assert said([Block(pre) for _ in range(BLOCKS)], code) == []


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("cuts", [(2,), (1, 2, 3)])
def test_a_stream_that_is_detached_before_a_block_is_a_note(cuts: tuple[int, ...], pre: bool) -> None:
    blocks = [Block(pre) for _ in range(BLOCKS)]
    for index in cuts:
        blocks[index].register_forward_pre_hook(lambda _, args: (args[0].detach(),))
    (finding,) = said(blocks, "NP309")
    assert (finding.severity.value, finding.where, finding.value) == ("note", str(cuts[0] + 1), float(len(cuts)))
    assert "is detached, and so is what this branch reads" in finding.message


def test_a_detached_stream_hides_no_detached_skip() -> None:
    blocks = [Block() for _ in range(BLOCKS)]
    blocks[1].register_forward_pre_hook(lambda _, args: (args[0].detach(),))
    blocks[3].skips[1] = detached
    lost, apart = said(blocks, "NP309")
    assert [(f.severity.value, f.where) for f in (lost, apart)] == [("warning", "4"), ("note", "2")]


def test_a_detached_branch_is_no_detached_skip() -> None:
    blocks = [Block() for _ in range(BLOCKS)]
    blocks[1].written = detached
    assert said(blocks, "NP309") == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_norm_whose_output_is_detached(which: int) -> None:
    blocks = [Block() for _ in range(BLOCKS)]
    blocks[2].normed[which] = detached
    (finding,) = said(blocks, "NP606")
    assert (finding.severity.value, finding.where) == ("warning", f"3.norms.{which}")
    assert "its gain gets no gradient, though the weights of its branch do" in finding.message


class Refined(nn.Module):
    """Points that each layer moves and hands on without a gradient, as detectors refine their boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.steps = nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for step in self.steps:
            x = x.detach() + step(x)
        return x


def test_points_that_are_refined_step_by_step_are_a_note() -> None:
    report = normprobe.probe(Refined(), torch.randn(3, 5, 8), level="backward")
    assert {f.severity.value for f in report.findings if f.code == "NP309"} <= {"note"}


@pytest.mark.parametrize(("placement", "severity"), [("pre", "warning"), ("none", "note")])
def test_streams_without_norms_may_be_cut_on_purpose(placement: str, severity: str) -> None:
    facts: dict[str, Any] = {"placement": placement}
    stream = b.stream(branches=tuple(b.branch(f"blocks.{i}", **facts) for i in range(3)), depth=3)
    gradients = b.gradients(sizes=(0.1,) * 3)
    cut = [g.model_copy(update={"stream": stream.name, "cut": g.branch == 1}) for g in gradients.branches]
    document = b.document(streams=(stream,), gradients=gradients.model_copy(update={"branches": tuple(cut)}))
    ((finding,), _) = judge("NP309", document)
    assert (finding.severity.value, finding.where) == (severity, "blocks.1")


class Detached(Plain):
    """One parameter holds the gains of all layers, and none of them gets a gradient."""

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return super().norm(x, gain if gain is self.last else gain.detach())


def test_np606_names_norms_whose_gains_are_parts_of_one_parameter() -> None:
    (found,) = normprobe.probe(Detached(stacked=True), INPUT, level="backward").findings
    assert (found.code, found.severity.value, len(found.every_place)) == ("NP606", "warning", 2 * LAYERS)
    assert normprobe.probe(Plain(stacked=True), INPUT, level="backward").findings == ()
