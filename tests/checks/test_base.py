"""The parts that checks are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normprobe.checks import Check, Limit, Needs, Outcome, Unit, limit
from normprobe.records import ReportData, Severity, Skipped


@final
@dataclass(frozen=True)
class Loud(Check):
    """A document has too many notes.

    ## What it measures

    Notes.
    """

    code, name, severity, since = "NP999", "too-many-notes", Severity.NOTE, "0.1.0"
    needs = Needs.STRUCTURE | Needs.BACKWARD

    most: float = limit(1.0, unit=Unit.RATIO, source="choice: one note is enough")

    def check(self, data: ReportData) -> Outcome:
        if self.exceeds(len(data.notes), self.most):
            yield self.finding(".", "many", value=float(len(data.notes)), against="most")


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False))
def test_only_finite_values_within_the_limit_pass(value: float, most: float) -> None:
    assert Check.exceeds(value, most) is not (math.isfinite(value) and value <= most)
    assert Check.exceeds(value, least=most) is not (math.isfinite(value) and value >= most)


def test_a_limit_itself_is_within_the_limit() -> None:
    assert not Check.exceeds(50.0, 50.0)
    assert not Check.exceeds(50.0, least=50.0)
    assert Check.exceeds(math.nextafter(50.0, 51.0), 50.0)
    assert Check.exceeds(-math.inf, 50.0)


def test_limits_can_be_read_back_and_set() -> None:
    assert Loud.limits() == (Limit("most", 1.0, "ratio", "choice: one note is enough"),)
    data = ReportData(level="backward", notes=("a", "b"))
    (finding,) = Loud().run(data)
    assert (finding.limit, finding.unit, finding.source) == (1.0, "ratio", "choice: one note is enough")
    assert list(Loud(most=2.0).run(data)) == []
    (milder,) = Loud(most=1.5).run(data)
    assert milder.limit == 1.5


@pytest.mark.parametrize(("value", "source"), [(math.inf, "a paper"), (math.nan, "a paper"), (1.0, " ")])
def test_a_limit_that_cannot_fail_or_explain_itself_is_refused(value: float, source: str) -> None:
    with pytest.raises(ValueError, match="a limit needs a finite value and a source"):
        limit(value, unit=Unit.ONE, source=source)


def test_a_finding_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="NP999: a finding needs a source or one of the limits, found 'mots'"):
        Loud().finding("a", "b", against="mots")


def test_places_are_listed_once_and_only_where_there_are_several() -> None:
    assert Loud().finding("a", "b", against="most", places=["a", "a"]).places == ()
    assert Loud().finding("a", "b", against="most", places=["a", "c", "a"]).places == ("a", "c")
    assert Loud().finding("", "b", against="most").where == "."


def test_a_level_that_is_too_low_is_said() -> None:
    (skipped,) = Loud().run(ReportData(level="forward"))
    assert isinstance(skipped, Skipped)
    assert skipped.what == "NP999 too-many-notes"
    assert 'ran at level "forward"' in skipped.why


def test_a_skip_names_three_places_and_counts_the_rest() -> None:
    assert Loud().skip("why", ["a", "b", "a"]).what == "NP999 too-many-notes at a, b"
    assert Loud().skip("why", [*"abcde"]).what == "NP999 too-many-notes at a, b, c and 2 more"
    assert Loud().skip("why", [*"abcdea"]).places == (*"abcde",)


def test_needs_are_named_in_order() -> None:
    assert (Needs.FORWARD | Needs.STRUCTURE).words() == ["structure", "forward"]


def test_the_page_is_the_docstring() -> None:
    assert Loud.summary() == "A document has too many notes."
    assert Loud.page().endswith("## What it measures\n\nNotes.")
