"""Rewrites under automatic mixed precision: planned and proven as the model is stored, and no stale cast is left."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from normprobe.errors import RewriteError
from normprobe.rewrites import FoldGains, Initialise, Survey, ToRMSNorm, make_plan
from normprobe.rewrites.as_stored import as_stored
from tests.models import gpt2
from tests.rewrites.cases import Scaled


def mixed() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def test_plan_and_proof_are_those_without_mixed_precision() -> None:
    model, inputs = gpt2()
    plain = make_plan(model, [ToRMSNorm()], inputs).apply()
    plain.undo()
    with mixed():
        model(**inputs)
        plan = make_plan(model, [ToRMSNorm()], inputs).apply()
    assert plan.steps[0][1] == plain.steps[0][1]
    assert plan.proof == plain.proof


def test_a_planted_error_is_found_under_mixed_precision() -> None:
    model, inputs = gpt2()
    with mixed(), pytest.raises(RewriteError, match="could not prove Scaled"):
        make_plan(model, [Scaled(1.001, ("transformer.ln_f",))], inputs).apply()


def test_what_ran_before_does_not_hide_a_rewrite_or_its_undo() -> None:
    model, inputs = gpt2()

    def logits() -> torch.Tensor:
        found: torch.Tensor = model(**inputs).logits
        return found

    with mixed():
        before = logits()
        plan = make_plan(model, [Initialise()], inputs).apply()
        after = logits()
        plan.undo()
        again = logits()
        plan.apply()
    with mixed():
        assert torch.equal(after, logits())
    assert torch.equal(again, before)


def test_mixed_precision_is_as_it_was_afterwards() -> None:
    model, inputs = gpt2()
    with mixed():
        make_plan(model, [FoldGains()], inputs)
        assert torch.is_autocast_enabled("cpu")
        with as_stored():
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_a_survey_is_that_without_mixed_precision() -> None:
    model, inputs = gpt2()
    plain = Survey.of(model, inputs)
    with mixed():
        assert Survey.of(model, inputs).anatomy == plain.anatomy
