"""Each rewrite of the catalogue: a frozen object of plain values, told in a line, and applied wholly or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from torch import nn

from benchmarks import rewriting
from normprobe.errors import RewriteError
from normprobe.rewrites import ALL, Initialise, MuP, Plan, Rewrite, load, make_plan
from normprobe.rewrites.edits import bytes_of
from normprobe.rewrites.initialise.schemes import SCHEMES
from tests.models import Built, gpt2
from tests.rewrites.rewritten import CASES, PICTURES

pytest.importorskip("transformers")
EVERY: dict[str, tuple[Callable[[], Built], Rewrite]] = CASES | PICTURES | {"MuP": (gpt2, MuP(base_width=16))}
ONE_EACH = {rewrite.name: name for name, (_, rewrite) in reversed(EVERY.items())}
DESCRIBED = [
    *rewriting.SETTINGS,
    *(rewrite for _, rewrite in EVERY.values()),
    *(Initialise(scheme) for scheme in SCHEMES),
]
PLAIN = (bool, int, float, str, tuple, type(None))


def everything(model: nn.Module) -> dict[str, Any]:
    """Tensors by identity and bits, modules by identity and class, and every attribute by value, or by identity."""
    facts = rewriting.snapshot(model)
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            keys = list(value) if isinstance(value, dict) else None
            facts[f"{path}.{name}"] = (repr(value) if isinstance(value, PLAIN) else id(value), keys)
    if hasattr(model, "config"):
        facts["config"] = repr(model.config.to_dict())
    return facts


def planned(name: str) -> tuple[nn.Module, Plan]:
    built, rewrite = EVERY[name]
    model, inputs = built()
    return model, make_plan(model, [rewrite], inputs)


def test_every_rewrite_of_the_catalogue_is_here() -> None:
    assert ONE_EACH.keys() == {kind.name for kind in ALL}


@pytest.mark.parametrize("rewrite", DESCRIBED, ids=lambda each: each.name)
def test_it_is_frozen_goes_to_json_and_back_and_is_told_in_a_line(rewrite: Rewrite) -> None:
    assert load(json.loads(json.dumps(rewrite.to_dict()))) == rewrite
    line = rewrite.describe()
    assert line.strip() == line
    assert "\n" not in line
    assert 10 < len(line) <= 120
    for field in dataclasses.fields(rewrite):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rewrite, field.name, None)
    hash(rewrite)


@pytest.mark.parametrize("name", EVERY)
def test_a_plan_shows_effect_sites_parameters_and_memory(name: str) -> None:
    model, plan = planned(name)
    text = str(plan).splitlines()
    ((rewrite, found),) = plan.steps
    assert f"{rewrite.name}, {rewrite.effect.value}: {rewrite.describe()}" in text
    count = len(found.sites)
    assert f"  {count} site{'' if count == 1 else 's'}, {len(found.refused)} refused" in text
    for site in found.sites:
        assert f"  {site.path}: {site.change}" in text
        told = (("edits", site.touched), ("adds", site.added), ("drops", site.gone))
        assert {f"    {word} {each}" for word, names in told for each in names} <= set(text)
    held = bytes_of(model, tuple(each for site in found.sites for each in site.touched))
    assert f"undo holds {held} bytes" in text


class Halting(ExitStack):
    """Fails once the reversal of step number `at` is kept; None: never, and `steps` counts."""

    at: int | None = None
    steps = 0

    def callback(self, *args: Any, **kwargs: Any) -> Any:
        kept = super().callback(*args, **kwargs)
        Halting.steps += 1
        if Halting.steps == Halting.at:
            raise KeyError("planted failure")
        return kept


def halted(plan: Plan, at: int | None) -> int:
    """The number of steps that were begun."""
    Halting.at, Halting.steps = at, 0
    with pytest.raises((RewriteError, KeyError), match="planted failure"):
        plan.apply()
    return Halting.steps


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_a_failure_at_any_step_leaves_the_model_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = planned(name)
    rewrite, before = plan.steps[0][0], everything(model)
    monkeypatch.setattr("normprobe.rewrites.plan.ExitStack", Halting)
    monkeypatch.setattr("normprobe.rewrites.plan.Baseline.of", lambda *args: None)

    def late(*args: Any) -> None:
        assert everything(model) != before
        raise KeyError("planted failure")

    with monkeypatch.context() as fitted:
        fitted.setattr(type(rewrite), "confirm", late)
        steps = halted(plan, None)
        assert everything(model) == before
    assert steps >= len(plan.steps[0][1].sites)
    for step in range(1, steps + 1):
        assert halted(plan, step) == step
        assert everything(model) == before, step
        assert plan.state == "planned"


class Broken:
    """The `change` of a rewrite, which fails once it has changed the site number `at`."""

    def __init__(self, change: Callable[..., None]) -> None:
        self.change, self.at, self.done = change, 0, 0

    def __call__(self, *args: Any) -> None:
        self.change(*args)
        self.done += 1
        if self.done > self.at:
            raise KeyError("planted failure")


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_a_failure_behind_any_site_leaves_the_model_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = planned(name)
    ((rewrite, found),) = plan.steps
    before, broken = everything(model), Broken(rewrite.change)
    monkeypatch.setattr("normprobe.rewrites.plan.Baseline.of", lambda *args: None)
    monkeypatch.setattr(type(rewrite), "change", lambda self, *args: broken(*args))
    for broken.at in range(len(found.sites)):
        broken.done = 0
        with pytest.raises(RewriteError, match="planted failure"):
            plan.apply()
        assert broken.done == broken.at + 1
        assert everything(model) == before, broken.at
