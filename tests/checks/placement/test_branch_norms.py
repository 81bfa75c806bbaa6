"""NP213: branches at one place that have a norm in no block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

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
        stack({**BARE, "normed_inside": True}),
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


class ByNumber(nn.Module):
    """The same in one forward, its layers in lists by kind; the norm of the class token a module or a function."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        made = [ClassAttention() for _ in range(3)]
        self.norm1 = nn.ModuleList(block.norm1 for block in made)
        self.norm2 = nn.ModuleList() if functional else nn.ModuleList(block.norm2 for block in made)
        self.attention = nn.ModuleList(block.attention for block in made)
        self.mlp = nn.ModuleList(block.mlp for block in made)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = x + self.attention[i](self.norm1[i](x))
            first = self.norm2[i](x[:, :1]) if self.norm2 else functional.rms_norm(x[:, :1], (models.WIDTH,))
            x = torch.cat([first, x[:, 1:]], 1)
            x = x + torch.cat([self.mlp[i](x[:, :1]), x[:, 1:]], 1)
        return x


BODIES: dict[str, Callable[[], nn.Module]] = {
    "modules": lambda: nn.Sequential(*(ClassAttention() for _ in range(3))),
    "lists": lambda: ByNumber(False),
    "functions": lambda: ByNumber(True),
}


@pytest.mark.parametrize("body", list(BODIES))
def test_a_norm_of_a_block_that_belongs_to_no_branch_is_said(body: str) -> None:
    model = nn.Sequential(BODIES[body](), nn.LayerNorm(models.WIDTH), nn.Linear(models.WIDTH, 4))
    report = normprobe.probe(model, torch.randn(2, 6, models.WIDTH))
    assert not [finding for finding in report.findings if finding.code == "NP213"]
    whys = [skipped.why for skipped in report.skipped if skipped.what.startswith("NP213")]
    assert any("which branch it belongs to could not be told" in why for why in whys)


class Inside(nn.Module):
    """An MLP without a norm before it, with one on its hidden features, before or behind the activation; and attention
    without a norm before it, with one on what its queries, keys and, `values`, values are made of."""

    def __init__(self, values: bool, late: bool) -> None:
        super().__init__()
        self.norm, self.hidden = nn.LayerNorm(models.WIDTH), nn.LayerNorm(4 * models.WIDTH)
        self.qkv, self.out = nn.Linear(models.WIDTH, 3 * models.WIDTH), nn.Linear(models.WIDTH, models.WIDTH)
        self.up, self.down = nn.Linear(models.WIDTH, 4 * models.WIDTH), nn.Linear(4 * models.WIDTH, models.WIDTH)
        self.sides = nn.ModuleList(nn.LayerNorm(models.WIDTH) for _ in range(3 if values else 2))
        self.late = late

    def attend(self, x: Tensor) -> Tensor:
        made = list(self.qkv(x).chunk(3, -1))
        for i, norm in enumerate(self.sides):
            made[i] = norm(made[i])
        q, k, v = (side.unflatten(-1, (2, -1)).transpose(1, 2) for side in made)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class InsideMlp(Inside):
    """Attention normed at its input, the MLP inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        up = self.up(x)
        return x + self.down(self.hidden(functional.gelu(up)) if self.late else functional.gelu(self.hidden(up)))


def stacked(block: Callable[[], nn.Module]) -> nn.Module:
    body = nn.Sequential(nn.Linear(models.WIDTH, models.WIDTH), *(block() for _ in range(3)))
    return nn.Sequential(body, nn.LayerNorm(models.WIDTH), nn.Linear(models.WIDTH, 4))


@pytest.mark.parametrize(
    "block",
    [lambda: Inside(True, False), lambda: InsideMlp(False, False), lambda: InsideMlp(False, True)],
    ids=["q, k and v", "before the activation", "behind it"],
)
def test_a_norm_inside_that_every_way_passes_stands_for_one(block: Callable[[], nn.Module]) -> None:
    assert found("NP213", stacked(block), torch.randn(2, 6, models.WIDTH)) == ()


def test_norms_on_queries_and_keys_alone_stand_for_none() -> None:
    (finding,) = found("NP213", stacked(lambda: Inside(False, False)), torch.randn(2, 6, models.WIDTH))
    assert "the attention branch has no norm" in finding.message
