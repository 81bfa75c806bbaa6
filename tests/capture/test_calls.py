"""Specs of recorded calls: structure kept, tensors replaced, small integers kept by value."""

from __future__ import annotations

import pytest
import torch

from normprobe.capture.calls import SMALL, CallSpec, TensorSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_floating_values_are_not_kept(dtype: torch.dtype) -> None:
    spec = TensorSpec.of(torch.ones(2, 3, dtype=dtype))
    assert (spec.shape, spec.dtype, spec.device.type, spec.value) == ((2, 3), dtype, "cpu", None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_small_integers_are_kept_as_copies(dtype: torch.dtype) -> None:
    tensor = torch.ones(SMALL, dtype=dtype)
    spec = TensorSpec.of(tensor)
    tensor.zero_()
    assert spec.value is not None
    assert bool(spec.value.all())


def test_large_integers_and_meta_are_not_kept() -> None:
    assert TensorSpec.of(torch.ones(SMALL + 1, dtype=torch.int64)).value is None
    meta = TensorSpec.of(torch.ones(2, dtype=torch.int64, device="meta"))
    assert (meta.value, meta.device.type) == (None, "meta")


def test_structure_of_a_call_is_kept() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    spec = CallSpec.of((x, [y, "word"], None), {"nest": {"z": z}, "number": 3})
    assert spec.args[1][1:] == ["word"]
    assert spec.args[2] is None
    assert spec.kwargs["number"] == 3
    assert spec.kwargs["nest"]["z"].shape == (3,)
    assert [t.shape for t in spec.tensors()] == [(1,), (2,), (3,)]


def test_specs_compare_by_form() -> None:
    ones, zeros = (TensorSpec.of(make(2, dtype=torch.int64)) for make in (torch.ones, torch.zeros))
    assert ones == zeros
    assert ones != TensorSpec.of(torch.ones(3, dtype=torch.int64))
