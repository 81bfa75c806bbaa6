"""Skipped branches and readouts against float64 forwards by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.measures import depth, trials
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


def test_progress_is_told_pass_by_pass_or_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder("pre")
    told: list[tuple[str, int, int]] = []
    depth_of(model, ids, tell=lambda *stage: told.append(stage))
    assert told == [("depth", 1, 9), ("depth", 9, 9)]
    told.clear()
    monkeypatch.setattr(trials, "ROOM", 0)
    depth_of(model, ids, tell=lambda *stage: told.append(stage))
    assert told == [("depth", done, 9) for done in range(1, 10)]


class Passes:
    """Counts the runs of a model and how many samples each had."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: list[int] = []
        self.hook = model.register_forward_pre_hook(lambda m, args: self.sizes.append(len(args[0])))


def close(one: DepthMeasure, other: DepthMeasure) -> bool:
    pairs = zip((*one.branches, *one.readouts), (*other.branches, *other.readouts), strict=True)
    return all(a.effect.change == pytest.approx(b.effect.change, rel=1e-4) for a, b in pairs)


def test_small_changes_run_together_beside_two_copies_that_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder("pre")
    anatomy, seen = anatomy_of(model, ids), Passes(model)
    together, _ = Depth().measure(Subject(model, ids, anatomy))
    assert seen.sizes == [len(ids), 10 * len(ids)]  # 6 writes, 2 readouts
    monkeypatch.setattr(trials, "ROOM", 0)
    seen.sizes.clear()
    alone, _ = Depth().measure(Subject(model, ids, anatomy))
    assert seen.sizes == 9 * [len(ids)]
    assert together is not None
    assert alone is not None
    assert close(together, alone)


def test_room_limits_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder("pre")
    anatomy = anatomy_of(model, ids)
    monkeypatch.setattr(trials, "ROOM", 6 * max(model(ids).numel(), model.embedding(ids).numel()))
    seen = Passes(model)
    found, _ = Depth().measure(Subject(model, ids, anatomy))
    assert seen.sizes == [len(ids), 6 * len(ids), 6 * len(ids)]
    assert found is not None
    assert len(found.branches) == 6


class Mixing(nn.Module):
    """Branches through which samples see each other: by statistics of the batch, or by those before them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            write = block(norm(x))
            x = x + {"before": lambda w: w.cumsum(0), "after": lambda w: w.flip(0).cumsum(0).flip(0)}[self.how](write)
        return self.head(x)


@pytest.mark.parametrize("how", ["before", "after"])
@torch.no_grad()
def test_where_samples_mix_every_change_has_a_pass_of_its_own(how: str) -> None:
    model, x = shaken(Mixing(how)), torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(2))
    anatomy, seen = anatomy_of(model, x), Passes(model)
    found, _ = Depth().measure(Subject(model, x, anatomy))
    assert seen.sizes == [3, 27, *7 * [3]]  # tried together once
    assert found is not None

    def output(without: int) -> Tensor:
        state = x
        for place, (norm, block) in enumerate(zip(model.norms, model.blocks, strict=True)):
            write = block(norm(state))
            mixed = write.cumsum(0) if how == "before" else write.flip(0).cumsum(0).flip(0)
            state = state if place == without else state + mixed
        return model.head(state)

    for place, one in enumerate(found.branches):
        assert_effect(one.effect, output(-1), output(place))


@torch.no_grad()
def test_batch_statistics_keep_changes_apart() -> None:
    layers = (nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 8))
    model = shaken(nn.Sequential(*[Residual(nn.Sequential(*map(copy.deepcopy, layers))) for _ in range(4)]))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    anatomy, seen = anatomy_of(model, x), Passes(model)
    found, _ = Depth().measure(Subject(model, x, anatomy))
    assert seen.sizes[1] > 6
    assert set(seen.sizes[2:]) == {6}
    assert found is not None
    without = model[3](model[2](model[0](x)))
    assert found.branches[1].effect.change == pytest.approx(float((without - model(x)).norm() / model(x).norm()))


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class FixedBatch(nn.Module):
    """Refuses any batch but its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 2
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_refuses_another_batch_is_run_change_by_change() -> None:
    found = depth_of(shaken(FixedBatch()), torch.randn(2, 3, 8))
    assert len(found.branches) == 4
    assert len(found.readouts) == 3


def test_what_cannot_be_measured_is_skipped_with_a_reason() -> None:
    model, ids = decoder("pre")
    anatomy = anatomy_of(model, ids)
    assert "meta" in Depth().measure(Subject(to_meta(model), ids, anatomy))[1][0].why
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    assert "no residual stream" in Depth().measure(Subject(plain, x, anatomy_of(plain, x)))[1][0].why


class Staged(nn.Module):
    """Two stages of two blocks; the second is half as high and wide, and its first skip is a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shortcut = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 1, stride=2)
        sizes = ((8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1))
            for i, o, s in sizes
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = ((self.shortcut(x) if index == 2 else x) + block(x)).relu()
        return self.head(x.mean((2, 3)))


def test_states_of_another_stage_are_no_readouts_and_hold_nothing_else_up() -> None:
    model, x = shaken(Staged()), torch.randn(2, 3, 8, 8)
    anatomy, seen = anatomy_of(model, x), Passes(model)
    found, skipped = Depth().measure(Subject(model, x, anatomy))
    assert seen.sizes == [2, 18]
    assert found is not None
    assert [one.block for one in found.readouts] == ["blocks.2"]
    assert {skip.why for skip in skipped} == {"the last state has shape (2, 16, 4, 4), the earlier one (2, 8, 8, 8)"}
    assert len(skipped) == 2


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_every_write_of_every_architecture_can_be_skipped(build: Callable[[], Any]) -> None:
    model, inputs = build()
    found = depth_of(model, inputs)
    assert len(found.branches) == found.writes
    assert all(one.effect.change and one.effect.change > 0 for one in (*found.branches, *found.readouts))
