from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from normprobe.report.sparks import BROKEN, RAMP, spark


def test_a_doubling_series_climbs_the_ramp_step_by_step() -> None:
    assert spark([2.0**k for k in range(8)], 8, log=True) == RAMP


def test_a_linear_scale_starts_at_zero() -> None:
    assert spark([5.0, 10.0], 2, log=False) == RAMP[4] + RAMP[7]
    assert spark([-10.0, 10.0], 2, log=False) == RAMP[0] + RAMP[7]


def test_rounding_noise_on_a_constant_stays_flat() -> None:
    assert spark([1.0, 1.0 + 1e-7, 1.0], 3, log=True) == RAMP[0] * 3


def test_few_values_are_held_and_many_are_gathered_by_their_largest() -> None:
    assert spark([1.0, 100.0], 6, log=True) == RAMP[0] * 3 + RAMP[7] * 3
    assert spark([1.0] * 50 + [100.0] + [1.0] * 49, 10, log=True).count(RAMP[7]) == 1


def test_one_value_that_is_not_finite_among_many_still_shows() -> None:
    values = [1.0] * 1000
    values[501] = math.nan
    assert spark(values, 10, log=True).count(BROKEN) == 1
    assert spark([math.inf], 3, log=False) == BROKEN * 3


def test_two_lines_can_share_a_scale() -> None:
    assert spark([1.0, 2.0], 2, log=True, scale=[1.0, 256.0]) == RAMP[0] + RAMP[1]


def test_zero_on_a_log_scale_is_the_lowest() -> None:
    assert spark([0.0, 1.0, 4.0], 3, log=True) == RAMP[0] + RAMP[0] + RAMP[7]


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=80),
    st.integers(1, 70),
    st.booleans(),
)
def test_any_series_fills_the_width(values: list[float], width: int, log: bool) -> None:
    line = spark(values, width, log=log)
    assert len(line) == width
    assert set(line) <= {*RAMP, BROKEN}
    if not all(map(math.isfinite, values)):
        assert BROKEN in line
