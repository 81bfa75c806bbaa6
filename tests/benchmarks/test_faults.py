"""The table of planted faults."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults import section, share, tried


def row(said: str, code: str = "NP101", model: str = "one", fault: str = "it") -> dict[str, Any]:
    return {"fault": fault, "code": code, "model": model, "site": "norm", "said": said, "detail": ""}


def test_the_share_leaves_out_what_the_check_could_not_look_at() -> None:
    rows = [row("found"), row("found"), row("missed"), row("not told"), row("behind")]
    assert share(rows) == pytest.approx(0.5)
    assert share([row("not told")]) is None
    assert share([]) is None


def test_the_section_counts_by_check_and_names_what_was_missed() -> None:
    rows = [
        row("found"),
        row("missed", model="two"),
        row("not told", "NP201", "two"),
        row("found", "NP201", fault="so"),
    ]
    text = section([*rows, {"model": "three", "said": "not built", "detail": "no"}])
    assert "2 operators (tests/faults) planted in 2 models" in text
    assert "| NP101 | 1 | 2 | 2 | 1 | 0 | 50.0 % |" in text
    assert "| NP201 | 2 | 2 | 2 | 1 | 1 | 100.0 % |" in text
    assert "| all | 2 | 2 | 4 | 2 | 1 | 66.7 % |" in text
    assert text.endswith("- NP101, it, in two at norm: missed")


def test_a_model_is_tried_with_the_faults_that_apply() -> None:
    rows = tried("tests by_hand", ["NP201", "NP705"])
    assert {(r["code"], r["said"]) for r in rows} == {("NP201", "found")}
    assert len(rows) > 1


def test_a_row_of_models_is_tried_by_a_sweep() -> None:
    rows = tried("widths perceptrons", ["NP607"])
    assert {(r["code"], r["said"], r["model"]) for r in rows} == {("NP607", "found", "perceptrons")}
    assert tried("widths perceptrons", ["NP201"]) == []
