"""Faults that hang on the width are found by a sweep, and sound models get no warning of one."""

from __future__ import annotations

import pytest

from tests.faults.widths import BUILDS, FAULTS, WidthFault, judged, sound, warned


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_factor_of_the_width_is_found_where_it_is(fault: WidthFault) -> None:
    found = [outcome for name in ("llama", "perceptrons") if (outcome := judged(name, fault)) is not None]
    assert found, "no model has a place for this fault"
    assert [str(one) for one in found if one.said != "found"] == []


@pytest.mark.parametrize("name", list(BUILDS))
def test_sound_models_are_not_warned_of(name: str) -> None:
    assert list(warned(sound(BUILDS[name]))) == []
