"""What is said of a planted fault: found, missed, too mild, behind another finding, or there before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normprobe.records import Anatomy
from tests.faults.architectures import by_hand
from tests.faults.edits import passing
from tests.faults.fault import Conditions, Fault, NotHereError, Site
from tests.faults.operators.norms import outside
from tests.faults.running import Subject, judged
from tests.faults.written import rewrite


def everywhere(anatomy: Anatomy) -> list[Site]:
    return [Site(anatomy.norms[0].path)]


def nothing(model: Any, anatomy: Any, site: Site) -> None:
    """Plants no fault."""


def broken(model: Any, anatomy: Any, site: Site) -> None:
    """Infinity in the first gain: an error of NP109, and of NP504 where a forward is measured."""
    with torch.no_grad():
        model.get_parameter(anatomy.norm(site.path).weight)[0] = float("inf")


def said(code: str, severity: Any, change: Any, **more: Any) -> str | None:
    outcome = judged(Subject("by hand", by_hand), Fault("it", code, severity, everywhere, change, **more))
    return None if outcome is None else outcome.said


def test_what_is_said_of_a_fault() -> None:
    forward = Conditions(level="forward")
    assert said("NP109", "error", broken) == "found"
    assert said("NP109", "error", nothing) == "missed"
    assert said("NP101", "warning", broken) == "missed"
    assert said("NP504", "error", broken, conditions=forward) == "behind"
    assert said("NP504", "error", broken, conditions=forward, also=frozenset({"NP109"})) == "found"


def not_cast(model: Any, anatomy: Any, site: Site) -> None:
    """A note in float32."""
    rewrite(model, anatomy, site, wide=False)


def test_what_is_mild() -> None:
    assert said("NP106", "note", not_cast) == "found"
    assert said("NP106", "warning", not_cast) == "mild"


def test_no_fault_is_planted_where_it_is_known() -> None:
    """A model whose first gain is broken from the start."""

    def build() -> Any:
        model, inputs = by_hand()
        broken(model, subject.anatomy, Site(subject.anatomy.norms[0].path))
        return model, inputs

    subject = Subject("by hand", by_hand)
    assert judged(Subject("broken", build), Fault("it", "NP109", "error", everywhere, broken)) is None


def test_what_is_not_told() -> None:
    """Without a norm there is nothing to look at, and the check says so."""

    def bare(model: Any, anatomy: Anatomy, site: Site) -> None:
        for norm in anatomy.norms:
            passing(model, norm.path)

    assert said("NP101", "warning", bare) == "not told"


def test_a_fault_that_raises_does_not_run() -> None:
    def raises(model: Any, anatomy: Any, site: Site) -> None:
        raise RuntimeError("no such thing")

    outcome = judged(Subject("by hand", by_hand), Fault("it", "NP101", "note", everywhere, raises))
    assert outcome is not None
    assert (outcome.said, outcome.detail) == ("does not run", "RuntimeError: no such thing")


def test_a_fault_without_a_place_does_not_apply() -> None:
    subject = Subject("by hand", by_hand)
    assert judged(subject, Fault("it", "NP101", "note", lambda anatomy: [], nothing)) is None
    stated = Conditions(states="eps")
    assert judged(subject, Fault("it", "NP104", "note", everywhere, nothing, conditions=stated)) is None
    with pytest.raises(NotHereError, match="no site"):
        outside.plant(by_hand()[0], Anatomy(), 0)


def test_the_site_follows_from_the_seed() -> None:
    subject = Subject("by hand", by_hand)
    chosen = [outside.plant(by_hand()[0], subject.anatomy, seed).path for seed in (0, 0, *range(8))]
    assert chosen[0] == chosen[1] == chosen[2]
    assert len(set(chosen)) > 2
