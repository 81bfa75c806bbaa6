"""Two rewrites of one model, in one plan or one after the other: both hold and both go, or a reason is given."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from normprobe.errors import RewriteError
from normprobe.rewrites import (
    AddOutputNorms,
    AddQKNorm,
    Fixup,
    FoldGains,
    Plan,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    Survey,
    ToPostNorm,
    ToRMSNorm,
)
from normprobe.rewrites.plan import plan_on
from tests.models import gpt2
from tests.rewrites.cases import snapshot

pytest.importorskip("transformers")
ONES = (
    FoldGains(),
    AddOutputNorms(),
    ToPostNorm(),
    ToRMSNorm(),
    ScaleResidual("skipinit", 0.5),
    Fixup(),
    AddQKNorm(),
    Reparametrise(),
)
PAIRS = list(itertools.combinations(ONES, 2))


@cache
def read() -> Survey:
    """Of the model that every test leaves as it was."""
    return Survey.of(*gpt2())


def applied(survey: Survey, rewrites: tuple[Rewrite, ...]) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return plan_on(survey, rewrites).apply()
    except RewriteError as refused:
        return str(refused)


def called(pair: tuple[Rewrite, Rewrite]) -> str:
    return "-".join(each.name for each in pair)


@pytest.mark.parametrize("pair", PAIRS, ids=called)
def test_in_one_plan_both_hold_or_the_plan_names_both(pair: tuple[Rewrite, Rewrite]) -> None:
    model = read().model
    before = snapshot(model)
    plan = applied(read(), pair)
    if isinstance(plan, str):
        assert all(each.name in plan for each in pair), plan
        assert "apply one plan, then make the other" in plan
    else:
        assert snapshot(model) != before
        plan.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("pair", [pair[::-1] for pair in PAIRS], ids=called)
def test_one_after_the_other_both_hold_or_the_second_is_refused(pair: tuple[Rewrite, Rewrite]) -> None:
    model, inputs = read().model, read().inputs
    before = snapshot(model)
    first = plan_on(read(), pair[:1]).apply()
    between = snapshot(model)
    second = applied(Survey.of(model, inputs), pair[1:])
    if isinstance(second, str):
        assert "would change nothing" in second, second
    else:
        with torch.no_grad():
            assert bool(model(**inputs).logits.isfinite().all())
        second.undo()
    assert snapshot(model) == between
    first.undo()
    assert snapshot(model) == before
