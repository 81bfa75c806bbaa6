"""Stored gains and offsets: their statistics against closed forms, and what cannot be read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import normprobe
from normprobe.measures.gains import elements
from normprobe.records import NormGain
from tests.norms import zoo

VALUES = torch.tensor([-2.0, 0.0, 1e-40, 0.5, 1.0, 3.0, math.nan, math.inf])


def test_numbers_are_those_of_the_finite_elements() -> None:
    found = elements("w", VALUES)
    assert (found.count, found.non_finite, found.zeros, found.negative, found.subnormal) == (8, 2, 1, 1, 1)
    assert (found.smallest, found.largest, found.peak, found.peak_at) == (-2.0, 3.0, 3.0, 5)
    assert found.median == pytest.approx(1e-40, rel=1e-5)  # the third of six
    assert found.typical == 0.5
    assert found.mean == pytest.approx(2.5 / 6)
    assert found.std == pytest.approx(math.sqrt((4 + 0.25 + 1 + 9) / 6 - (2.5 / 6) ** 2))
    assert (found.parameter, found.dtype, found.constant) == ("w", "float32", None)


def test_a_gain_is_as_it_is_used() -> None:
    found = elements("w", torch.tensor([-1.0, -0.25, 0.0, 1e-40]), plus=1.0)
    assert (found.zeros, found.negative, found.stored_negative, found.subnormal) == (1, 0, 2, 1)
    assert (found.smallest, found.largest) == (0.0, 1.0)
    assert elements("w", torch.tensor([1.0, -3.0, 2.0])).peak_at == 1


def test_nothing_finite_is_not_a_number() -> None:
    found = elements("w", torch.full((3,), math.nan))
    assert all(math.isnan(x) for x in (found.smallest, found.largest, found.median, found.mean, found.std, found.peak))
    assert found.constant is None
    assert elements("w", torch.full((3,), 0.3)).constant == pytest.approx(0.3)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_order_changes_nothing_and_sign_turns(values: list[float]) -> None:
    x = torch.tensor(values)
    found, turned = elements("w", x), elements("w", -x)
    back = elements("w", x.flip(0))
    assert back.model_dump(exclude={"peak_at", "mean", "std"}) == found.model_dump(exclude={"peak_at", "mean", "std"})
    assert (turned.smallest, turned.largest, turned.peak) == (-found.largest, -found.smallest, found.peak)
    assert turned.negative == found.count - found.zeros - found.negative
    assert found.constant == (values[0] if len(set(values)) == 1 else None)


@pytest.mark.parametrize("level", ["structure", "forward"])
def test_gains_of_a_model_at_every_level(level: str) -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), zoo.RMSNorm(one_plus=True), nn.LayerNorm(32, bias=False))
    model[2].weight.data.fill_(0.5)
    model[3].weight.data[3] = 9.0
    found = normprobe.probe(model, torch.randn(2, 32), level=level).measurements.norm_gains
    assert [(g.path, g.one_plus, g.offset is None) for g in found] == [
        ("0", False, False),
        ("2", True, True),
        ("3", False, True),
    ]
    assert [_constant(g) for g in found] == [1.0, 1.5, None]
    assert found[2].gain is not None
    assert (found[2].gain.parameter, found[2].gain.peak_at) == ("3.weight", 3)


def _constant(gain: NormGain) -> float | None:
    return None if gain.gain is None else gain.gain.constant


def test_norms_without_a_gain_have_no_row_and_the_meta_device_none() -> None:
    bare = nn.Sequential(nn.LayerNorm(32, elementwise_affine=False))
    assert normprobe.probe(bare, torch.randn(2, 32)).measurements.norm_gains == ()
    report = normprobe.probe(nn.Sequential(nn.LayerNorm(32)).to("meta"), torch.randn(2, 32, device="meta"))
    assert report.measurements.norm_gains == ()


def test_a_gain_that_is_no_parameter_is_skipped_with_the_reason() -> None:
    norm = zoo.Rule(lambda self, x: self.w**2 * torch.nn.functional.rms_norm(x, (32,), eps=1e-5), w=torch.rand(32) + 1)
    report = normprobe.probe(nn.Sequential(norm, nn.Linear(32, 32)), torch.randn(2, 32))
    assert report.measurements.norm_gains == ()
    assert [(s.what, s.why) for s in report.skipped if s.what.startswith("gain of norm")] == [
        ("gain of norm 0", "its gain is neither a parameter nor 1 plus one")
    ]
