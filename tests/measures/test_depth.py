"""Skipped branches and readouts against float64 forwards by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.measures import depth
from normprobe.measures.depth import Depth
from normprobe.measures.distributions import kl
from normprobe.measures.extra import Subject
from normprobe.records.depth import DepthMeasure, Effect
from tests.measures.models import Adds, ResNet, anatomy_of, bert, neox, shaken
from tests.models import MODELS, decoder, to_meta, torch_encoder


def depth_of(model: nn.Module, inputs: Any, **options: Any) -> DepthMeasure:
    found, skipped = Depth().measure(Subject(model, inputs, anatomy_of(model, inputs), **options))
    assert skipped == ()
    assert found is not None
    return found


def divergence(full: Tensor, other: Tensor) -> float:
    """The definition, with plain probabilities."""
    p, q = full.double().softmax(-1), other.double().softmax(-1)
    return float((p * (p / q).log()).sum(-1).mean())


def assert_effect(found: Effect, full: Tensor, other: Tensor) -> None:
    assert found.kl == pytest.approx(divergence(full, other), rel=1e-3, abs=1e-7)
    assert found.change == pytest.approx(float((other - full).norm() / full.norm()), rel=1e-4)
    assert found.agreement == pytest.approx(float((full.argmax(-1) == other.argmax(-1)).double().mean()))


def test_kl_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log()
    assert kl(p, q) == pytest.approx(0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log())
    assert kl(p + 3, p) == pytest.approx(0, abs=1e-6)
    assert kl(p, torch.tensor([[0.0, 1.0, 0.0]]).log()) == float("inf")
    assert kl(torch.full((1, 3), torch.nan), q) != kl(p, q)


def test_kl_of_almost_equal_distributions_is_exact() -> None:
    """float32 has −1e-9 or so where the divergence is Σ p δ² / 2."""
    p = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    moved = p + 1e-5 * torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    wide = moved.double() - p.double()
    weights = p.double().softmax(-1)
    spread = (weights * wide.square()).sum(-1) - (weights * wide).sum(-1).square()
    assert kl(p, moved) == pytest.approx(float(spread.mean() / 2), rel=1e-3)


def by_hand(model: nn.Module, ids: Tensor, placement: str, without: tuple[int, str] | None, end: int) -> Tensor:
    """Logits with one write left out and with the final norm and head on the state after `end` blocks."""
    x = model.embedding(ids)
    for number, block in enumerate(model.blocks[:end]):
        for name, part in (("mix", block.mix), ("think", block.think)):
            write = part.branch(part.norm(x) if placement == "pre" else x)
            x = x + (0 if without == (number, name) else 1) * write
            x = part.norm(x) if placement == "post" and not (name == "think" and number == end - 1) else x
    last = model.final if placement == "pre" else model.blocks[-1].think.norm
    return model.head(last(x))


@pytest.mark.parametrize("placement", ["pre", "post"])
@torch.no_grad()
def test_skipped_writes_and_readouts_equal_forwards_by_hand(placement: str) -> None:
    model, ids = decoder(placement, final=placement == "pre")
    found = depth_of(model, ids)
    model.double()
    full = by_hand(model, ids, placement, None, 3)
    assert torch.allclose(full, model(ids))
    assert [(b.block, b.kind) for b in found.branches] == [
        (f"blocks.{i}", kind) for i in range(3) for kind in ("attention", "mlp")
    ]
    for place, one in enumerate(found.branches):
        assert_effect(one.effect, full, by_hand(model, ids, placement, (place // 2, ("mix", "think")[place % 2]), 3))
    assert [r.block for r in found.readouts] == ["blocks.0", "blocks.1"]
    for end, one in enumerate(found.readouts, 1):
        assert_effect(one.effect, full, by_hand(model, ids, placement, None, end))
    assert found.basis.count == ids.numel()
    assert found.basis.exact
    assert found.writes == 6


@torch.no_grad()
def test_adds_in_place_on_maps() -> None:
    model, x = shaken(ResNet()), torch.randn(2, 3, 5, 7)
    found = depth_of(model, x)

    def logits(without: int, end: int = 4) -> Tensor:
        state = model.stem(x)
        for index, block in enumerate(model.blocks[:end]):
            state = (state if index == without else block(state) + state).relu()
        return model.head(state.mean((2, 3)))

    for index, one in enumerate(found.branches):
        assert_effect(one.effect, logits(-1), logits(index))
    for index, one in enumerate(found.readouts, 1):
        assert_effect(one.effect, logits(-1), logits(-1, index))


class InPlace(nn.Module):
    """One tensor that every block adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))
        self.final, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for block in self.blocks:
            x += block(x)
        return self.head(self.final(x))


@torch.no_grad()
def test_a_stream_in_one_memory() -> None:
    model, x = shaken(InPlace()), torch.randn(2, 6, 8)
    found = depth_of(model, x)

    def logits(without: int, end: int = 3) -> Tensor:
        state = x * 2
        for index, block in enumerate(model.blocks[:end]):
            state = state if index == without else state + block(state)
        return model.head(model.final(state))

    for index, one in enumerate(found.branches):
        assert_effect(one.effect, logits(-1), logits(index))
    for index, one in enumerate(found.readouts, 1):
        assert_effect(one.effect, logits(-1), logits(-1, index))


@torch.no_grad()
def test_padding_is_left_out() -> None:
    case = bert()
    found = depth_of(case.model, case.inputs)
    kept = case.inputs["attention_mask"].bool()
    full = case.model(**case.inputs).last_hidden_state[kept]
    part = case.model.encoder.layer[0].output
    hook = part.dense.register_forward_hook(lambda m, args, output: torch.zeros_like(output))
    other = case.model(**case.inputs).last_hidden_state[kept]
    hook.remove()
    assert found.basis.count == int(kept.sum())
    assert found.branches[1].effect.change == pytest.approx(float((other - full).norm() / full.norm()), rel=1e-4)


def test_a_model_without_a_head_has_changes_alone() -> None:
    model, x = torch_encoder(True, True)
    found = depth_of(model, x)
    assert found.basis.unit == "1"
    assert all(one.effect.kl is None and one.effect.agreement is None for one in found.branches)
    assert all(one.effect.change and one.effect.change > 0.01 for one in found.branches)


def test_a_branch_that_writes_nothing_changes_nothing() -> None:
    writes = torch.eye(4)
    writes[2] = 0
    found = depth_of(Adds(writes), torch.randn(2, 3, 4))
    changes = [one.effect.change for one in found.branches]
    assert changes[2] == 0
    assert all(change and change > 0.01 for place, change in enumerate(changes) if place != 2)


def test_of_many_writes_a_seeded_sample_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "MOST", 3)
    model, ids = decoder("pre")
    one, same, other = (depth_of(model, ids, seed=seed) for seed in (1, 1, 2))
    assert len(one.branches) == 3
    assert one.writes == 6
    assert not one.basis.exact
    assert one == same
    assert [b.path for b in one.branches] != [b.path for b in other.branches]


def test_branches_that_share_an_add_are_skipped_together() -> None:
    case = neox()
    assert {one.kind for one in depth_of(case.model, case.inputs).branches} == {"attention+mlp"}


def test_progress_is_told() -> None:
    model, ids = decoder("pre")
    told: list[tuple[str, int, int]] = []
    depth_of(model, ids, tell=lambda *stage: told.append(stage))
    assert told == [("depth", done, 9) for done in range(1, 10)]


def test_what_cannot_be_measured_is_skipped_with_a_reason() -> None:
    model, ids = decoder("pre")
    anatomy = anatomy_of(model, ids)
    assert "meta" in Depth().measure(Subject(to_meta(model), ids, anatomy))[1][0].why
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    assert "no residual stream" in Depth().measure(Subject(plain, x, anatomy_of(plain, x)))[1][0].why


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_every_write_of_every_architecture_can_be_skipped(build: Callable[[], Any]) -> None:
    model, inputs = build()
    found = depth_of(model, inputs)
    assert len(found.branches) == found.writes
    assert all(one.effect.change and one.effect.change > 0 for one in (*found.branches, *found.readouts))
