"""Rewrites in inference mode, and of models that were made there: torch trains nothing that was made in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.capture.invoke import invoke
from normprobe.capture.outputs import named_tensors
from normprobe.errors import RewriteError
from normprobe.rewrites import AddQKNorm, make_plan
from tests.models import gpt2, made_in_inference_mode
from tests.rewrites.cases import snapshot
from tests.rewrites.test_catalogue import EVERY, ONE_EACH

CASES = [*ONE_EACH.values(), "AddQKNorm-full-llama"]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    return [tensor for _, tensor in named_tensors(invoke(model, inputs)) if tensor.is_floating_point()]


@pytest.mark.parametrize("name", CASES)
def test_what_is_rewritten_there_can_be_trained(name: str) -> None:
    built, rewrite = EVERY[name]
    wanted, inputs = built()
    proof = make_plan(wanted, [rewrite], inputs).apply().proof
    model, inputs = built()
    before = snapshot(model)
    with torch.inference_mode():
        plan = make_plan(model, [rewrite], inputs).apply()
        assert torch.is_inference_mode_enabled()
    assert [key for key, held in state(model).items() if held.is_inference()] == []
    assert same(state(model), state(wanted))
    assert plan.proof == proof
    given = outputs(model, inputs)
    for one, other in zip(given, outputs(wanted, inputs), strict=True):
        assert torch.equal(one, other)
    given[0].square().mean().backward()  # type: ignore[no-untyped-call]
    added = {each for _, found in plan.steps for site in found.sites for each in site.added}
    learned = {key for key, held in model.named_parameters() if held.requires_grad and held.grad is None}
    assert added & learned == set()
    with torch.inference_mode():
        plan.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_a_model_that_was_made_there_is_rewritten(name: str) -> None:
    built, rewrite = EVERY[name]
    wanted, inputs = built()
    make_plan(wanted, [rewrite], inputs).apply()
    model, inputs = made_in_inference_mode(built())
    held = {id(tensor) for tensor in state(model).values()}
    with torch.inference_mode():
        before = snapshot(model)
    plan = make_plan(model, [rewrite], inputs).apply()
    assert same(state(model), state(wanted))
    assert [key for key, t in state(model).items() if t.is_inference() and id(t) not in held] == []
    with torch.inference_mode():
        plan.undo()
        assert snapshot(model) == before
        plan.apply()
    assert same(state(model), state(wanted))


def test_gains_are_not_distilled_through_what_was_made_in_inference_mode() -> None:
    model, inputs = made_in_inference_mode(gpt2())
    before = snapshot(model)
    with pytest.raises(
        RewriteError, match=r"cannot be distilled\n.*\n  found: transformer\.wte\.weight, .* torch\.inference_mode"
    ):
        make_plan(model, [AddQKNorm(start="distilled", steps=1)], inputs).apply()
    assert snapshot(model) == before
