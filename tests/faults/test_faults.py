"""Every fault operator raises its own code in small models, and that code is the first of its severity."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice

import pytest

from tests.faults.architectures import subjects
from tests.faults.fault import Fault
from tests.faults.operators import ALL
from tests.faults.running import Outcome, judged

SUBJECTS = subjects()
MOST = 1  # drawn for each fault; the benchmark takes all, and more models


@cache
def outcomes(fault: Fault) -> tuple[Outcome, ...]:
    """What became of it in small models that have a place for it, at most `MOST` of them."""
    order = random.Random(fault.name).sample(SUBJECTS, len(SUBJECTS))
    found = (outcome for subject in order if (outcome := judged(subject, fault)) is not None)
    return tuple(islice(found, MOST))


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: f"{fault.code}-{fault.name.replace(' ', '-')}")
def test_a_fault_raises_its_own_code_first(fault: Fault) -> None:
    found = outcomes(fault)
    assert found, "no small model has a place for this fault"
    assert [str(one) for one in found if one.said != "found"] == []
