"""NP213: branches at one place that have a norm in no block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import Branch, BranchScale, Stream
from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import anatomy, found, judge, replace

BUILT = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "olmo2": models.olmo2,
    "gemma2": models.gemma2,
    "by hand": lambda: models.decoder("pre"),
}


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("name", list(BUILT))
def test_norms_that_one_kind_of_branch_lacks_everywhere_are_found(name: str, kind: str) -> None:
    model, inputs = BUILT[name]()
    assert found("NP213", model, inputs) == ()
    (stream,) = anatomy(model, inputs).streams
    for branch in stream.branches:
        for norm in (branch.pre_norm, branch.output_norm):
            if branch.kind == kind and norm is not None:
                replace(model, norm, nn.Identity())
    (finding,) = found("NP213", model, inputs)
    blocks = tuple(dict.fromkeys(branch.block for branch in stream.branches))
    assert (finding.severity.value, finding.where, finding.places) == ("warning", blocks[0], blocks)
    assert f"the {kind} branch has no norm in any of the {len(blocks)} blocks" in finding.message


BARE: dict[str, Any] = {"placement": "none", "pre_norm": None}


def stack(bare: dict[str, Any], blocks: int = 2, **rest: Any) -> Stream:
    """Blocks of attention and MLP, the MLP without a norm."""
    made: list[Branch] = []
    for i in range(blocks):
        made.append(b.branch(f"blocks.{i}", **{"kind": "attention"} | rest))
        made.append(b.branch(f"blocks.{i}", **bare))
    return b.stream(branches=tuple(made), depth=2 * blocks)


def test_what_the_others_have_is_said() -> None:
    (finding,), _ = judge("NP213", b.document(streams=(stack(BARE, placement="sandwich"),)))
    assert "their attention branch has one (placement sandwich)" in finding.message


@pytest.mark.parametrize(
    "stream",
    [
        stack(BARE, blocks=1),
        stack({}),
        stack(BARE, **BARE),
        stack(BARE, placement="unknown"),
        stack({**BARE, "kind": "conv"}),
        stack({**BARE, "kind": "other"}),
        stack({**BARE, "branch_scale": BranchScale(kind="constant", value=0.1)}),
        stack({**BARE, "branch_scale": BranchScale(kind="channel")}),
        stack({**BARE, "skip": "gate", "skip_scale": None}),
        stack({**BARE, "skip_scale": 2.0}),
    ],
    ids=lambda stream: "",
)
def test_what_is_built_so_or_scaled_is_no_finding(stream: Stream) -> None:
    assert judge("NP213", b.document(streams=(stream,))) == ((), ())


def test_one_block_that_has_the_norm_leaves_it_to_np206() -> None:
    whole = stack(BARE, blocks=3)
    branches = (*whole.branches[:-1], b.branch("blocks.2"))
    assert judge("NP213", b.document(streams=(whole.model_copy(update={"branches": branches}),))) == ((), ())


def test_where_there_is_no_stream_it_is_skipped() -> None:
    found_none, (skip,) = judge("NP213", b.document(streams=()))
    assert (found_none, skip.why) == ((), "no residual stream was found")


class ClassAttention(nn.Module):
    """Attention as usual; then the class token alone is normed, and its MLP reads what the norm gave (XCiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(models.WIDTH), nn.LayerNorm(models.WIDTH)
        self.attention, self.mlp = models.Attention(), models.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = torch.cat([self.norm2(x[:, :1]), x[:, 1:]], 1)
        return x + torch.cat([self.mlp(x[:, :1]), x[:, 1:]], 1)


def test_a_norm_of_a_block_that_belongs_to_no_branch_is_said() -> None:
    model = nn.Sequential(*(ClassAttention() for _ in range(3)), nn.LayerNorm(models.WIDTH), nn.Linear(models.WIDTH, 4))
    report = normprobe.probe(model, torch.randn(2, 6, models.WIDTH))
    assert not [finding for finding in report.findings if finding.code == "NP213"]
    whys = [skipped.why for skipped in report.skipped if skipped.what.startswith("NP213")]
    assert any("which branch it belongs to could not be told" in why for why in whys)
