"""Output norms added, norms that are too many removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.norms import reference
from normprobe.rewrites import AddOutputNorms, Effect, RemoveNorms, Survey, ToDyT, make_plan
from tests import models
from tests.rewrites.cases import applied, outputs, snapshot

BUILDS = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "t5": models.t5,
    "bert": models.bert,
    "neox": lambda: models.neox(True),
    "torch": lambda: models.torch_encoder(True, True),
}


# ---- AddOutputNorms


@pytest.mark.parametrize("name", BUILDS)
def test_every_branch_ends_in_a_norm(name: str) -> None:
    model, inputs = BUILDS[name]()
    kept = snapshot(model)
    plan = applied(model, inputs, AddOutputNorms())
    streams = Survey.of(model, inputs).anatomy.streams
    assert all(branch.output_norm is not None for stream in streams for branch in stream.branches)
    plan.undo()
    assert snapshot(model) == kept


def test_what_is_written_is_the_norm_of_what_was() -> None:
    model, inputs = models.llama()
    seen: list[Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: seen.append(out[0]))
    outputs(model, inputs)
    applied(model, inputs, AddOutputNorms(only="model.layers.0", start="calibrated"))
    size = float(seen[0].square().mean().sqrt())
    gain = model.model.layers[0].self_attn.output_norm.weight
    assert torch.allclose(gain, torch.full_like(gain, size), rtol=1e-5)
    outputs(model, inputs)
    assert torch.allclose(seen[-1], size * reference.rmsnorm(seen[0], 1e-6), atol=1e-5)


def test_what_became_of_the_norms_that_it_goes_by_is_told() -> None:
    model, inputs = models.llama()
    applied(model, inputs, ToDyT("unit"))
    with pytest.raises(RewriteError, match="is a dyt, which has no statistic to go by: add norms before"):
        make_plan(model, [AddOutputNorms()], inputs).apply()


def test_gains_are_calibrated_on_what_came_without_the_norms() -> None:
    model, inputs = models.gpt2()
    norms = [f"transformer.h.{i}.{part}" for i in range(2) for part in ("attn", "mlp")]
    sizes: dict[str, float] = {}
    handles = []
    for path in norms:

        def look(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
            write = out if isinstance(out, Tensor) else out[0]
            sizes.setdefault(path, float(write.square().mean().sqrt()))

        handles.append(model.get_submodule(path).register_forward_hook(look))
    outputs(model, inputs)
    for handle in handles:
        handle.remove()
    applied(model, inputs, AddOutputNorms(start="calibrated"))
    for path in norms:
        gain = model.get_submodule(path).output_norm.weight
        assert torch.allclose(gain, torch.full_like(gain, sizes[path]), rtol=1e-4)


# ---- RemoveNorms


class Doubled(nn.Module):
    """A pre-norm stack with two final norms, and one norm that nothing calls."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        width = models.WIDTH
        self.norms = nn.ModuleList(kind(width) for _ in range(2))
        self.reads = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.idle, self.first, self.second = kind(width), kind(width), kind(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for norm, read in zip(self.norms, self.reads, strict=True):
            x = x + torch.tanh(read(norm(x)))
        out: Tensor = self.head(self.second(self.first(x)))
        return out


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_second_norm_goes_into_the_first(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = models.shuffled(Doubled(kind)).double(), torch.randn(4, 7, models.WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model.first.weight.fill_(3.0)
        if kind is nn.LayerNorm:
            model.first.bias.zero_()
    before, kept = outputs(model, x), snapshot(model)
    plan = applied(model, x, RemoveNorms())
    assert {site.path for site in plan.steps[0][1].sites} == {"idle", "second"}
    assert float((outputs(model, x) - before).abs().max()) <= 1e-4  # eps acts once
    assert not any(name.startswith(("idle", "second")) for name in model.state_dict())
    plan.undo()
    assert snapshot(model) == kept
    assert list(model._modules) == ["norms", "reads", "idle", "first", "second", "head"]


def test_with_gains_of_their_own_it_is_near() -> None:
    torch.manual_seed(0)
    model, x = models.shuffled(Doubled(nn.LayerNorm)), torch.randn(4, 7, models.WIDTH)
    before = outputs(model, x)
    plan = applied(model, x, RemoveNorms(only="second"))
    assert plan.proof is not None
    assert plan.proof.max_rel <= 0.1
    assert not torch.equal(outputs(model, x), before)


def test_a_norm_of_an_optional_part_stays() -> None:
    class Optional(Doubled):
        def __init__(self) -> None:
            super().__init__(nn.LayerNorm)
            self.second = nn.Identity()
            self.beside = nn.Linear(models.WIDTH, models.WIDTH)

    model, x = models.shuffled(Optional()), torch.randn(2, 7, models.WIDTH)
    with pytest.raises(RewriteError, match="a part that is optional"):
        applied(model, x, RemoveNorms())


def test_taking_out_what_never_runs_is_exact_and_merging_is_not() -> None:
    torch.manual_seed(0)
    model, x = models.shuffled(Doubled(nn.LayerNorm)), torch.randn(4, 7, models.WIDTH)
    assert make_plan(model, [RemoveNorms()], x).effect is Effect.CALIBRATED
    before = outputs(model, x)
    plan = applied(model, x, RemoveNorms(only="idle"))
    assert plan.effect is Effect.EXACT
    assert "RemoveNorms, exact:" in str(plan)
    assert plan.proof is not None
    assert plan.proof.holds
    assert torch.equal(outputs(model, x), before)
