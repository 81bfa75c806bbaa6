"""Each rewrite of the catalogue: a frozen object of plain values, told in a line, and applied wholly or not at all."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

from benchmarks import rewriting
from normprobe import rewrites
from normprobe.errors import RewriteError
from normprobe.rewrites import ALL, Initialise, MuP, Plan, Rewrite, load, make_plan
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
HOME = Path(rewrites.__file__).parent
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
def test_a_plan_shows_effect_sites_and_parameters(name: str) -> None:
    _, plan = planned(name)
    text = str(plan).splitlines()
    ((rewrite, found),) = plan.steps
    assert f"{rewrite.name}, {rewrite.effect.value}: {rewrite.describe()}" in text
    count = len(found.sites)
    assert f"  {count} site{'' if count == 1 else 's'}, {len(found.refused)} refused" in text
    for site in found.sites:
        assert f"  {site.path}: {site.change}" in text
        told = (("edits", site.touched), ("adds", site.added), ("drops", site.gone))
        assert {f"    {word} {each}" for word, names in told for each in names} <= set(text)


@cache
def _ours(file: str) -> bool:
    return HOME in Path(file).parents


class Traced:
    """The `change` of a rewrite, line by line: `lines` are those before which the model was changed, counted over all
    sites, and the change fails there once `at` is one of them."""

    def __init__(self, change: Callable[..., None], model: nn.Module) -> None:
        self.change, self.modules, self.config = change, tuple(model.modules()), getattr(model, "config", None)
        self.lines: list[int] = []
        self.at: int | None = None
        self.begin()

    def begin(self) -> None:
        """From the first site anew."""
        self.count, self.last = 0, self.marks()
        if self.at is None:
            self.lines.clear()

    def __call__(self, *args: Any) -> None:
        before = sys.gettrace()
        sys.settrace(self.enter)
        try:
            self.change(*args)
        finally:
            sys.settrace(before)

    def enter(self, frame: FrameType, event: str, given: Any) -> Any:
        return self.line if _ours(frame.f_code.co_filename) else None

    def line(self, frame: FrameType, event: str, given: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.at is None and (now := self.marks()) != self.last:
                self.lines.append(self.count)
                self.last = now
            if self.count == self.at:
                raise KeyError("planted failure")
        return self.line

    def marks(self) -> list[Any]:
        """What is another thing once a module, an attribute, a table or a parameter is changed."""
        owns = [vars(each) for each in (*self.modules, *([self.config] if self.config else []))]
        tables = [[[*map(id, held.values())] for held in own.values() if isinstance(held, dict)] for own in owns]
        versions = [p._version for module in self.modules for p in module._parameters.values() if p is not None]
        things = [[*map(id, own.values())] for own in owns]
        return [things, tables, versions, [type(module) for module in self.modules]]


def halted(plan: Plan) -> None:
    with pytest.raises((RewriteError, KeyError), match="planted failure"):
        plan.apply()


@pytest.mark.parametrize("name", [*ONE_EACH.values(), "ToRMSNorm-untie"])
def test_a_failure_at_any_step_leaves_the_model_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = planned(name)
    ((rewrite, found),) = plan.steps
    before, traced = everything(model), Traced(rewrite.change, model)
    monkeypatch.setattr("normprobe.rewrites.plan.Baseline.of", lambda *args: None)
    monkeypatch.setattr(type(rewrite), "change", lambda self, *args: traced(*args))

    def late(*args: Any) -> None:
        assert everything(model) != before
        raise KeyError("planted failure")

    with monkeypatch.context() as fitted:
        fitted.setattr(type(rewrite), "confirm", late)
        for _ in range(2):  # the first time classes are made that are there the next time: it has more lines
            traced.begin()
            halted(plan)
            assert everything(model) == before
    assert len(traced.lines) >= len(found.sites) - 1
    for at in tuple(traced.lines):
        traced.at = at
        traced.begin()
        halted(plan)
        assert traced.count == at
        assert everything(model) == before, at
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
