"""Several things that one check finds at one place are told apart, so that one that is known hides no other."""

from __future__ import annotations

from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import Declared, Finding, Head, ReportData
from normprobe.report.baseline import against, baseline_of
from tests.checks import builders as b


def declared(*fields: tuple[str, Any, Any]) -> ReportData:
    said = (Declared(path=".", field=field, fact=fact, stated=value, value=value) for field, fact, value in fields)
    data = b.document(declared=tuple(said))
    head = data.anatomy.model_copy(update={"head": Head(path="head.weight", tied_to=None)})
    return data.model_copy(update={"anatomy": head})


LIMIT = "final_logit_softcapping", "logit_softcap", 30.0
FACTOR = "logit_scale", "logit_multiplier", 0.5
BROKEN = {"gain": b.elements("norm.weight", non_finite=2), "offset": b.elements("norm.bias", 0.0, non_finite=2)}


def gains(*broken: str) -> ReportData:
    held = {name: BROKEN[name] for name in broken}
    return b.document(
        norms=(b.norm("norm"),), norm_gains=(b.gain("norm", held=held.get("gain"), offset=held.get("offset")),)
    )


def statistics(**facts: Any) -> ReportData:
    site = b.batch_norm(tracked=28, initial_share=0.5, **facts)
    return b.document(batchnorm=b.batchnorm(site), init=b.init(0.0, trained=True))


PAIRS: dict[str, tuple[ReportData, ReportData]] = {
    "NP109": (gains("gain"), gains("gain", "offset")),
    "NP212": (declared(LIMIT), declared(LIMIT, FACTOR)),
    "NP705": (statistics(), statistics(kept=b.kept(divergence=2.0))),
}


def judged(code: str, data: ReportData) -> ReportData:
    found, _ = run(data, [find(code)])
    return data.model_copy(update={"findings": found, "checks": (code,)})


@pytest.mark.parametrize("code", PAIRS)
def test_a_second_thing_at_a_known_place_is_new(code: str) -> None:
    before, after = (judged(code, data) for data in PAIRS[code])
    assert len(before.findings) == 1
    assert len({finding.where for finding in after.findings}) == 1
    known = {finding.about: finding.known for finding in against(after, baseline_of(before)).findings}
    assert sorted(known.values()) == [False, True]
    assert known[before.findings[0].about]


def test_nothing_that_was_measured_is_in_what_it_is_about() -> None:
    for data in PAIRS.values():
        found: list[Finding] = [one for code in PAIRS for one in judged(code, data[1]).findings]
        assert not any(character.isdigit() for one in found for character in one.about)
