"""Measures that are asked for: which run, what they are given, and what becomes of their numbers."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from normprobe import probe
from normprobe.errors import SettingError
from normprobe.measures import extras
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.extras import EXTRAS
from normprobe.records import Measurements, Record, Skipped
from normprobe.records.extras import ABOUT, EXTRA_NAMES, ExtraName
from tests.measures.models import Adds


class Told(Extra):
    """Keeps what it was given."""

    name: ClassVar[ExtraName] = "gain"
    seen: ClassVar[list[Subject]] = []

    def measure(self, subject: Subject) -> tuple[Record | None, tuple[Skipped, ...]]:
        self.seen.append(subject)
        return None, (Skipped(what="gain", why="a test"),)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Subject]:
    monkeypatch.setattr(extras, "EXTRAS", (Told(),))
    monkeypatch.setattr(Told, "seen", [])
    return Told.seen


@pytest.mark.parametrize("names", [("gain",), ("all",), "gain", "all"])
def test_a_measure_that_is_asked_for_runs_once_with_what_the_level_found(
    told: list[Subject], names: tuple[str, ...] | str
) -> None:
    stages = []
    report = probe(
        Adds(torch.eye(4)), torch.randn(1, 3, 4), measures=names, seed=5, progress=lambda *a: stages.append(a)
    )
    (subject,) = told
    assert subject.seed == 5
    assert subject.anatomy == report.anatomy
    assert len(subject.measured.residual) == 1
    assert Skipped(what="gain", why="a test") in report.skipped
    assert ("gain", 0, 0) in stages


def test_none_runs_unasked(told: list[Subject]) -> None:
    probe(Adds(torch.eye(4)), torch.randn(1, 3, 4))
    assert told == []


def test_unknown_names_and_a_level_without_signal_are_refused(told: list[Subject]) -> None:
    with pytest.raises(SettingError, match="unknown measure 'gains'"):
        probe(Adds(torch.eye(4)), torch.randn(1, 3, 4), measures=("gains",))
    with pytest.raises(SettingError, match="measures need a signal"):
        probe(Adds(torch.eye(4)), torch.randn(1, 3, 4), level="structure", measures=("gain",))
    assert told == []


def test_every_measure_has_a_field_a_line_and_a_place_in_the_order() -> None:
    names = [extra.name for extra in EXTRAS]
    assert names == [name for name in EXTRA_NAMES if name in names]
    assert set(names) == set(ABOUT)
    assert set(names) <= set(Measurements.model_fields)
