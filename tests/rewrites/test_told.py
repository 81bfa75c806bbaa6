"""What a plan tells before anything moves is what happens: parameters edited, added and gone, and what undo holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from normprobe.rewrites import (
    ALL,
    FoldBatchNorm,
    Initialise,
    MuP,
    Plan,
    RemoveNorms,
    Rewrite,
    ScaleResidual,
    ToPostNorm,
    make_plan,
)
from tests.models import Built, gpt2, llama
from tests.rewrites.rewritten import CASES, PICTURES, cnn, doubled

MORE: dict[str, tuple[Callable[[], Built], Rewrite]] = {
    "MuP": (gpt2, MuP(base_width=16)),
    "Initialise-deepnorm": (llama, Initialise("deepnorm")),
    "ScaleResidual-constant": (gpt2, ScaleResidual("constant", 0.5)),
    "ToPostNorm": (gpt2, ToPostNorm()),
}
EVERY = CASES | PICTURES | MORE


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def told(plan: Plan, what: str) -> set[str]:
    return {name for _, found in plan.steps for site in found.sites for name in getattr(site, what)}


def test_every_rewrite_is_here() -> None:
    assert {type(rewrite) for _, rewrite in EVERY.values()} == set(ALL)


@pytest.mark.parametrize("name", EVERY)
def test_a_plan_tells_which_parameters_are_edited_added_and_gone_and_what_undo_holds(name: str) -> None:
    built, rewrite = EVERY[name]
    model, inputs = built()
    before, buffers = parameters(model), dict(model.named_buffers(remove_duplicate=False))
    values = {own: p.detach().clone() for own, p in before.items()}
    plan = make_plan(model, [rewrite], inputs).apply()
    after = parameters(model)
    assert told(plan, "added") == {own for own, p in after.items() if before.get(own) is not p}
    assert told(plan, "gone") == before.keys() - after.keys()
    kept = {own for own, p in after.items() if before.get(own) is p}
    moved = {id(before[own]) for own in kept if not torch.equal(after[own], values[own])}
    assert moved <= {id(before[own]) for own in told(plan, "touched")}
    left = {id(t) for t in (*model.parameters(), *model.buffers())}
    out = [t for t in (*before.values(), *buffers.values()) if id(t) not in left]
    written = [before[own] for own in told(plan, "touched")]
    holds = sum(site.undo_bytes for _, found in plan.steps for site in found.sites)
    assert size([*out, *written]) <= holds <= 2 * size([*out, *written])
    assert f"undo holds {holds} byte" in str(plan)


def test_what_goes_is_named_with_what_an_optimiser_still_holds() -> None:
    model, inputs = doubled()
    text = str(make_plan(model, [RemoveNorms()], inputs))
    assert "    drops model.norm.1.weight\n" in text
    assert "parameters go: an optimiser made before, or a DistributedDataParallel, still holds them" in text
    assert "parameters are added" not in text


def test_an_offset_that_is_added_learns_as_its_weight_does() -> None:
    for learns in (False, True):
        model, inputs = cnn()
        model.requires_grad_(learns)
        plan = make_plan(model, [FoldBatchNorm()], inputs).apply()
        assert told(plan, "added")
        assert {p.requires_grad for p in model.parameters()} == {learns}
