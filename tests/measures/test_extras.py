"""Measures that are asked for: which run, what they are given, and what becomes of their numbers."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any, ClassVar

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
from tests.models import decoder, llama, t5


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


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the forwards of a model and the backwards of one probe."""
    backward = torch.autograd.grad

    def count(model: torch.nn.Module, inputs: Any, **options: Any) -> tuple[int, int]:
        told: Counter[str] = Counter()
        forward = type(model).forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            told["backward"] += 1
            return backward(*args, **kwargs)

        @functools.wraps(forward)
        def ran(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            told["forward"] += self is model
            return forward(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(model), "forward", ran)
            patch.setattr(torch.autograd, "grad", counted)
            probe(model, inputs, **options)
        return told["forward"], told["backward"]

    return count


def test_a_level_takes_the_passes_that_it_says(passes: Any) -> None:
    model, ids = decoder("pre")
    assert passes(model, ids, level="structure") == (1, 0)
    assert passes(model, ids) == passes(model, ids, exact=True) == (2, 0)
    assert passes(model, ids, level="backward") == (3, 1)


def stated(text: str, blocks: int, writes: int, streams: int, inputs: int) -> tuple[int, int]:
    """The forwards and backwards that the words of a measure come to for such a model."""
    each = {"every block": blocks, "every stream": streams, "every input": inputs, "a stream": streams}
    each |= {"each write": writes, "each block but the last of its stream": blocks - streams}
    each |= {"each half precision": 2}
    counts = Counter[str]()
    kind = ""
    for part in re.split(r"[,;:] | and (?=1)", text):
        if number := re.match(r"\d+", part):
            kind = next((word for word in ("backward", "forward") if word in part), kind)
            size = next((size for word, size in each.items() if part.endswith(word) or f"{word} (" in part), 1)
            counts[kind] += int(number[0]) * size
    return counts["forward"], counts["backward"]


@pytest.mark.parametrize(
    ("build", "blocks", "writes", "streams", "inputs"), [(llama, 2, 4, 1, 1), (t5, 4, 10, 2, 2)], ids=["llama", "t5"]
)
@pytest.mark.parametrize("name", [name for name in EXTRA_NAMES if name != "batchnorm"])
def test_a_measure_takes_the_passes_that_it_says(
    passes: Any, name: str, build: Any, blocks: int, writes: int, streams: int, inputs: int
) -> None:
    model, values = build()
    forwards, backwards = passes(model, values, measures=(name,))
    said = stated(ABOUT[name].passes, blocks, writes, streams, inputs)
    if "small ones together" in ABOUT[name].passes:
        assert 1 < forwards - 2 <= said[0]
        forwards = said[0] + 2
    assert (forwards - 2, backwards) == said


def test_batch_norms_take_the_passes_that_they_say(passes: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    forwards, backwards = passes(model, torch.randn(6, 4), measures=("batchnorm",))
    assert (forwards - 2, backwards) == stated(ABOUT["batchnorm"].passes, 0, 0, 0, 1) == (4, 0)
