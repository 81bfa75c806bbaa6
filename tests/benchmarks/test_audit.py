"""The section of the audit benchmark."""

from __future__ import annotations

import sys

import pytest

from benchmarks import audit
from benchmarks.quiet import Ratio


@pytest.mark.parametrize(("ratio", "end"), [(1.9, "Limit: 2 times."), (2.1, "Limit: 2 times (missed).")])
def test_the_section_has_the_ratio_and_says_where_the_limit_is_missed(ratio: float, end: str) -> None:
    text = audit.section(Ratio(ratio, 1.5, 2.5, plain=3.21, taken=0.0), tokens=512, repeats=9)
    assert f"takes **{ratio:.2f}** (quartiles 1.50–2.50) times as long" in text
    assert "runs one forward (3.2 s)" in text
    assert text.endswith(end)


def test_a_command_that_could_not_run_ends_the_benchmark() -> None:
    audit.run([sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(SystemExit, match="exit code 2"):
        audit.run([sys.executable, "-c", "raise SystemExit(2)"])
