from __future__ import annotations

import math

import pytest

from normprobe.records import Severity
from normprobe.report.wording import amount, ascii_only, listing, number, plural, tally


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.131, "0.131"), (45.24, "45.2"), (1e-5, "1e-05"), (9.999999747378752e-06, "1e-05"),
        (65504.0, "65504"), (999.6, "1000"), (1234.5, "1234"), (-1234.5, "-1234"), (1.2e8, "1.2e+08"),
        (math.nan, "nan"), (math.inf, "∞"), (-math.inf, "-∞"),
    ],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (72, "72"),
        (9000, "9000"),
        (12_345, "12,345"),
        (134_515_008, "135M"),
        (1_240_000_000, "1.24B"),
        (2 * 10**12, "2T"),
    ],
)
def test_amounts(count: int, text: str) -> None:
    assert amount(count) == text


def test_a_tally_names_every_severity_or_says_clean() -> None:
    assert tally([]) == "clean"
    assert tally([Severity.NOTE]) == "0 errors, 0 warnings, 1 note"
    assert tally([Severity.WARNING, Severity.ERROR, Severity.WARNING]) == "1 error, 2 warnings, 0 notes"


def test_plural_and_listing() -> None:
    assert plural(1, "branch", "branches") == "1 branch"
    assert plural(0, "branch", "branches") == "0 branches"
    assert listing(["a", "b", "b"]) == "2 b, 1 a"


def test_ascii_spells_signs_out_and_drops_nothing_silently() -> None:
    assert ascii_only("√L · 0–3 × ∞") == "sqrtL - 0-3 x inf"
    assert ascii_only("層") == "?"
