"""The slices behind computed weights, against closed forms, and what is not read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import normprobe
from normprobe.measures.computed_weights import measure_computed_weights
from normprobe.records import Anatomy, ComputedWeight, Reparametrization


def read(weight: torch.Tensor, kind: str = "weight_norm", axes: tuple[int, ...] = (1,)) -> ComputedWeight:
    """The slices of a parameter of this value."""
    model = nn.Module()
    model.v = nn.Parameter(weight)
    how = Reparametrization.model_validate({"path": ".", "kind": kind, "parameter": "v", "axes": axes})
    (found,), skipped = measure_computed_weights(model, Anatomy(reparametrizations=(how,)))
    assert skipped == ()
    return found


def test_norms_of_rows_and_of_columns() -> None:
    v = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 5.0, 12.0], [math.nan, 1.0, 1.0]])
    rows = read(v)
    assert (rows.count, rows.elements, rows.non_finite, rows.empty) == (4, 3, 1, 1)
    assert (rows.smallest, rows.smallest_at, rows.median) == (0.0, 1, 5.0)
    columns = read(v[:3], axes=(0,))
    assert (columns.count, columns.elements, columns.empty) == (3, 3, 0)
    assert columns.smallest == 3.0
    whole = read(v[:3], "spectral_norm", (0, 1))
    assert (whole.count, whole.elements) == (1, 9)
    assert whole.smallest == pytest.approx(math.sqrt(9 + 16 + 25 + 144))


def test_middle_axes_may_number_the_slices() -> None:
    v = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    v[:, 2] = 0
    found = read(v, axes=(0, 2))
    assert (found.count, found.elements, found.empty, found.smallest_at) == (5, 12, 1, 2)
    assert found.median == pytest.approx(float(v.double().norm(dim=(0, 2)).median()))


@pytest.mark.parametrize(("size", "empty"), [(1e-19, 0), (1e-30, 1)])
def test_a_norm_that_is_zero_in_its_own_dtype_is_none(size: float, empty: int) -> None:
    assert read(torch.full((1, 4), size)).empty == empty
    assert read(torch.full((1, 4), size, dtype=torch.float64)).empty == 0


def test_a_deviation_that_rounding_leaves_is_none() -> None:
    v = torch.full((3, 9), 0.1)
    v[1, 4] = 0.1 + 1e-8  # the next number
    v[2, 4] = 0.1001
    found = read(v, "weight_standardization")
    assert found.empty == 2
    assert read(v[2:], "weight_standardization").smallest == pytest.approx(1e-4 * math.sqrt(8) / 9, rel=1e-3)
    assert read(torch.ones(3, 1), "weight_standardization").empty == 3
    assert read(torch.ones(3, 2), "weight_standardization", ()).empty == 6
    assert read(v.bfloat16(), "weight_standardization").empty == 3


def test_gains_are_counted() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)))
    model[0].parametrizations.weight.original0.data[2:4] = 0
    (found,) = normprobe.probe(model, torch.randn(2, 4), level="structure").measurements.computed_weights
    assert (found.gains, found.zero_gains, found.empty) == (6, 2, 0)
    (again,) = normprobe.probe(model, torch.randn(2, 4)).measurements.computed_weights
    assert again == found


def test_nothing_is_read_on_the_meta_device_nor_of_plain_weights() -> None:
    meta = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6))).to("meta")
    report = normprobe.probe(meta, torch.randn(2, 4, device="meta"))
    assert len(report.anatomy.reparametrizations) == 1
    assert report.measurements.computed_weights == ()
    assert normprobe.probe(nn.Linear(4, 6), torch.randn(2, 4)).measurements.computed_weights == ()


def test_what_holds_no_plain_numbers_is_skipped() -> None:
    how = Reparametrization(path="fc", kind="weight_norm", parameter="gone", axes=(1,))
    found, (skipped,) = measure_computed_weights(nn.Linear(2, 2), Anatomy(reparametrizations=(how,)))
    assert found == ()
    assert skipped.what == "computed weight of fc"
