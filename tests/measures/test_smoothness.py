"""The Lipschitz constant of the gradient against closed forms and float64 steps by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.measures.extra import Subject
from normprobe.measures.smoothness import DISTANCES, Smoothness
from normprobe.records.smoothness import SmoothnessMeasure
from tests.measures.models import anatomy_of, gpt2
from tests.models import decoder, to_meta


def smoothness_of(model: nn.Module, inputs: Any, loss: Any = None) -> SmoothnessMeasure:
    found, skipped = Smoothness().measure(Subject(model, inputs, anatomy_of(model, inputs), loss=loss))
    assert skipped == ()
    assert found is not None
    return found


def test_a_quadratic_loss_has_the_length_of_the_hessian_times_the_gradient() -> None:
    """|Wx|² / n is quadratic in W: at every distance β is ‖H g‖ / ‖g‖, with H g = 2 g X'X / n."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3, bias=False).double(), torch.randn(7, 5, dtype=torch.float64)
    found = smoothness_of(model, x, lambda y, inputs: y.square().sum() / 7)
    weight = model.weight.detach()
    gram = 2 * x.mT @ x / 7
    gradient = weight @ gram
    exact = float((gradient @ gram).norm() / gradient.norm())
    assert [step.lipschitz for step in found.steps] == pytest.approx([exact] * len(DISTANCES), rel=1e-9)
    assert found.lipschitz == pytest.approx(exact, rel=1e-9)
    assert found.gradient_norm == pytest.approx(float(gradient.norm()))
    assert found.parameter_norm == pytest.approx(float(weight.norm()))
    assert [step.distance for step in found.steps] == pytest.approx([d * float(weight.norm()) for d in DISTANCES])


def test_steps_equal_those_by_hand_in_float64() -> None:
    model, ids = decoder("pre")
    found = smoothness_of(model, ids)
    model.double()

    def gradient() -> tuple[float, list[Tensor]]:
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))

    def norm(parts: list[Tensor]) -> float:
        return math.sqrt(sum(float(part.detach().square().sum()) for part in parts))

    _, start = gradient()
    length, betas = norm(list(model.parameters())), []
    for share, step in zip(DISTANCES, found.steps, strict=True):
        way = share * length
        with torch.no_grad():
            for parameter, part in zip(model.parameters(), start, strict=True):
                parameter.sub_(way / norm(start) * part)
        loss, there = gradient()
        with torch.no_grad():
            for parameter, part in zip(model.parameters(), start, strict=True):
                parameter.add_(way / norm(start) * part)
        change = norm([a - b for a, b in zip(there, start, strict=True)])
        cosine = sum(float((a * b).sum()) for a, b in zip(there, start, strict=True)) / norm(there) / norm(start)
        betas.append(change / way)
        assert step.loss == pytest.approx(loss, rel=1e-5)
        assert step.gradient_change == pytest.approx(change, rel=2e-3)  # the difference of two float32 gradients
        assert step.cosine == pytest.approx(cosine, abs=1e-5)
    assert found.lipschitz == pytest.approx(max(betas), rel=2e-3)


def test_a_tied_parameter_counts_once() -> None:
    case = gpt2()
    assert case.model.transformer.wte.weight is case.model.lm_head.weight
    found = smoothness_of(case.model, case.inputs)
    assert found.basis.count == sum(p.numel() for p in case.model.parameters())


def test_steps_that_the_dtype_rounds_away_are_skipped() -> None:
    model, ids = decoder("pre")
    model.bfloat16()
    found, skipped = Smoothness().measure(Subject(model, ids, anatomy_of(model, ids)))
    assert skipped
    assert all("rounds so short a step" in skip.why for skip in skipped)
    assert (0 if found is None else len(found.steps)) + len(skipped) == len(DISTANCES)


def test_a_loss_without_a_gradient_has_no_step() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    found, (skip,) = Smoothness().measure(Subject(model, x, anatomy_of(model, x), loss=lambda y, inputs: (0 * y).sum()))
    assert found is None
    assert "the gradient's norm is 0" in skip.why


def test_models_on_meta_are_skipped() -> None:
    model, ids = decoder("pre")
    anatomy = anatomy_of(model, ids)
    found, (skip,) = Smoothness().measure(Subject(to_meta(model), ids, anatomy))
    assert found is None
    assert "meta" in skip.why
