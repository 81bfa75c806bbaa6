"""Cases from the field: eps, gains and types of norms."""

from __future__ import annotations

import math

import pytest
import torch

import normprobe
from tests.cases.field import case, codes, only, report

LOUD = "error", "warning"


def test_c01_an_eps_that_is_no_small_part_of_the_mean_square() -> None:
    large, small = report("c01", 1e-5), report("c01", 1e-6)
    for r, eps in ((large, 1e-5), (small, 1e-6)):
        assert [n.eps for n in r.anatomy.norms] == pytest.approx([eps] * 7)
    finding = only(large, "NP103")
    assert "model.layers.0.input_layernorm" in (finding.where, *finding.places)
    sound, inputs = case("c01").build(1e-5, embed_std=0.5)
    assert "NP103" not in codes(normprobe.probe(sound, inputs))


@pytest.mark.parametrize(
    ("place", "placement"), [("inside", "inside_sqrt"), ("outside", "outside_sqrt"), ("rescaled", "scaled")]
)
def test_c03_where_eps_stands(place: str, placement: str) -> None:
    found = report("c03", place)
    assert found.anatomy.norms[0].eps_placement == placement
    assert found.anatomy.norms[0].eps == pytest.approx(1e-5, rel=0.01)
    assert ("NP101" in codes(found)) == (place != "inside")


def test_c05_one_is_added_twice() -> None:
    folded, right = report("c05", True), report("c05", False)
    assert {n.affine for r in (folded, right) for n in r.anatomy.norms} == {"one_plus_weight"}
    finding = only(folded, "NP112")
    assert len(finding.places) == 5
    assert finding.value == pytest.approx(2.0, abs=0.1)
    assert not codes(right, *LOUD)


@pytest.mark.parametrize("fill", [math.nan, 0.0, 1e30])
def test_c20_gains_that_nobody_initialised(fill: float) -> None:
    found = report("c20", fill)
    named = [f for f in found.findings if f.code in ("NP109", "NP110", "NP111")]
    assert {place for f in named for place in (f.where, *f.places)} >= {"0.norm", "1.norm", "2"}
    assert named[0].code == ("NP110" if fill == 0 else "NP109")
    assert found.findings[0] in named


@pytest.mark.parametrize(("kind", "count"), [("qwen3", 9), ("gpt2", 5)])
def test_c23_gains_under_weight_decay(kind: str, count: int) -> None:
    model, inputs = case("c23").build(kind)
    decayed = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    finding = only(normprobe.probe(model, inputs, optimizer=decayed), "NP114")
    assert len(finding.places) == count
    spared = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    assert "NP114" not in codes(normprobe.probe(model, inputs, optimizer=spared))


def test_c40_an_eps_that_is_0_in_half_precision() -> None:
    found = report("c40")
    assert "eps 1e-12 becomes 0 in float16" in only(found, "NP102").message
    assert "NP102" not in codes(report("c40", torch.float32))
    assert "NP102" not in codes(report("c40", eps=1e-5))
