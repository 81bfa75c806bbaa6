"""No exact rewrite edits what a part that did not run may stand in for; every plan names such parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import (
    Effect,
    FoldGains,
    PlainWeights,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    StoreGains,
    ToRMSNorm,
    make_plan,
)
from tests.models import VOCABULARY, WIDTH, Mlp, gpt2, llama, shuffled
from tests.rewrites.cases import outputs, snapshot

IDS = torch.arange(20).reshape(2, 10) % VOCABULARY


class Block(nn.Module):
    """x + mix(norm(x)), then x + out[task](tanh(tasks[task](norm(x)))): what runs is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(WIDTH), Mlp()
        self.norm2, self.tasks = nn.LayerNorm(WIDTH), nn.ModuleList(Mlp() for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.task = 0

    def write(self, x: Tensor) -> Tensor:
        return self.out[self.task](self.tasks[self.task](x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.write(self.norm2(x))


class Model(nn.Module):
    """Blocks of which the first `depth` run, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, 7) for _ in range(3))
        self.depth = 3

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for block in list(self.blocks)[: self.depth]:
            x = block(x)
        found: Tensor = self.heads[self.blocks[0].task](self.norm(x))
        return found


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    found = shuffled(Model()).double()
    assert isinstance(found, Model)
    return found


def turn(model: Model, task: int) -> Model:
    for block in model.blocks:
        block.task = task
    return model


EXACT = [FoldGains(), ScaleResidual(), ToRMSNorm(), StoreGains("one_plus_weight"), Reparametrise()]


@pytest.mark.parametrize("rewrite", EXACT, ids=lambda each: each.name)
def test_what_is_applied_is_exact_for_what_did_not_run(model: Model, rewrite: Rewrite) -> None:
    before, kept = outputs(turn(model, 1), IDS), snapshot(model)
    plan = make_plan(turn(model, 0), [rewrite], IDS)
    if plan.steps[0][1].sites:
        plan.apply()
    else:
        with pytest.raises(RewriteError, match="did not run and may take its place"):
            plan.apply()
        assert snapshot(turn(model, 1)) == kept
    assert torch.allclose(outputs(turn(model, 1), IDS), before, rtol=0, atol=1e-10)


def test_a_place_that_stands_alone_is_rewritten_and_the_others_say_what_is_beside(model: Model) -> None:
    found = make_plan(model, [FoldGains()], IDS).steps[0][1]
    assert [site.path for site in found.sites] == [f"blocks.{i}.norm1" for i in range(3)]
    assert {refusal.path: refusal.why.partition(" did")[0] for refusal in found.refused} == {
        "norm": "heads.1 beside heads.0",
        **{f"blocks.{i}.norm2": f"blocks.{i}.tasks.1 beside blocks.{i}.tasks.0" for i in range(3)},
    }


def test_whole_blocks_that_do_not_run_are_in_the_way_of_what_goes_through_the_stream_alone(model: Model) -> None:
    for held in (*(block.tasks for block in model.blocks), *(block.out for block in model.blocks), model.heads):
        del held[1:]
    model.depth = 2
    assert len(make_plan(model, [FoldGains()], IDS).steps[0][1].sites) == 5
    refused = make_plan(model, [ToRMSNorm()], IDS).steps[0][1]
    assert not refused.sites
    assert "blocks.2 beside blocks.0 did not run" in refused.refused[0].why


def test_a_plan_names_what_did_not_run(model: Model) -> None:
    idle = 3 * 2 * (4 + 2) + 2 * 2
    line = f"{idle} parameters did not run on these inputs, and no proof covers what they compute: blocks.0.tasks.1.up"
    assert line in str(make_plan(model, [FoldGains()], IDS))
    assert f"and {idle - 4} more" in str(make_plan(model, [FoldGains()], IDS))


@pytest.mark.parametrize("built", [gpt2, llama], ids=lambda each: each.__name__)
def test_nothing_is_said_where_everything_ran(built: object) -> None:
    model, inputs = built()  # type: ignore[operator]
    assert "did not run" not in str(make_plan(model, [FoldGains(), PlainWeights()], inputs))


def test_a_part_that_ran_is_in_nobodys_way() -> None:
    class Both(nn.Module):
        """Two branches, read by one weight each."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.mlp1, self.mlp2, self.spare = Mlp(), Mlp(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mlp1(self.norm1(x))
            return x + self.mlp2(self.norm2(x))

    torch.manual_seed(0)
    plan = make_plan(shuffled(nn.Sequential(Both(), Both())), [FoldGains(only="0.norm1")], torch.randn(2, 5, WIDTH))
    assert [site.path for site in plan.steps[0][1].sites] == ["0.norm1"]


def test_only_what_is_to_be_exact_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FoldGains, "usual", Effect.CALIBRATED)
    assert len(make_plan(model, [FoldGains()], IDS).steps[0][1].sites) == 7
