"""Floating buffers: which of them belong together, and which hold rounded values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.diffing.buffers import BufferPair, compare_buffers
from normprobe.records.diff import Difference
from tests.diffing.models import decoder, tokens

TABLE = 10000.0 ** -torch.linspace(0, 1, 16)  # as of rotary angles


def holding(**buffers: Tensor) -> nn.Module:
    model = decoder()
    for name, values in buffers.items():
        model.register_buffer(name, values.clone())
    return model


def told(a: nn.Module, b: nn.Module) -> tuple[Difference, ...]:
    return normprobe.diff(a, b, tokens()).differences


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_side_that_holds_rounded_values_is_named_with_the_dtype(dtype: torch.dtype, kept: bool) -> None:
    short = TABLE.to(dtype) if kept else TABLE.to(dtype).float()
    off = float(((short.double() - TABLE.double()).abs() / TABLE.double()).max())
    for tables, sides in (((TABLE, short), "BA"), ((short, TABLE), "AB")):
        (found,) = told(*(holding(table=table) for table in tables))
        assert (found.severity.value, found.fact, found.where) == ("warning", "buffers_rounded", (("table", "table"),))
        name = str(dtype).removeprefix("torch.")
        assert f"holds in {sides[0]} the values of {sides[1]} rounded to {name}, {100 * off:.3g} % off" in found.message


def test_two_roundings_are_told_without_a_side() -> None:
    pair = holding(table=TABLE.half()), holding(table=TABLE.bfloat16())
    (row,), skipped = compare_buffers(*pair, 0)
    assert (row.relation, row.short, row.dtype, skipped) == ("rounded", None, "", ())
    (found,) = (one for one in told(*pair) if one.fact == "buffers_rounded")
    assert "1 floating buffer of 1 is equal after rounding, " in found.message


def test_a_buffer_of_one_model_alone_hides_no_other() -> None:
    a, b = holding(extra=torch.rand(3), table=TABLE), holding(table=TABLE.bfloat16())
    report = normprobe.diff(a, b, tokens())
    assert [(one.fact, one.where) for one in report.differences] == [("buffers_rounded", (("table", "table"),))]
    (skip,) = (one for one in report.skipped if one.what.startswith("floating buffers"))
    assert skip.what == "floating buffers: extra of A"
    assert "their values were not compared" in skip.why


def test_buffers_are_paired_by_value_then_in_order_or_by_name() -> None:
    a, b = holding(one=TABLE), holding(other=TABLE + 1)
    assert compare_buffers(a, b, 0) == ((BufferPair("one", "other", "different"),), ())
    a, b = holding(one=TABLE, mask=torch.ones(4)), holding(mask=torch.ones(4), other=TABLE)
    pairs, skipped = compare_buffers(a, b, 0)
    assert [(pair.a, pair.b, pair.relation) for pair in pairs] == [("one", "other", "equal"), ("mask", "mask", "equal")]
    assert skipped == ()
    a, b = holding(table=TABLE), holding(table=torch.ones(4))
    (skip,) = compare_buffers(a, b, 0)[1]
    assert skip.what == "floating buffers: table of A, table of B"
    many = holding(**{f"b{i}": torch.ones(i + 1) for i in range(5)})
    (skip,) = compare_buffers(many, decoder(), 0)[1]
    assert skip.what == "floating buffers: b0 of A, b1 of A, b2 of A and 2 more"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits(dtype: torch.dtype) -> None:
    scales = torch.linspace(0.1, 1.0, 16)
    short = scales.to(dtype)
    assert compare_buffers(holding(s=short), holding(s=short), 0)[0] == (BufferPair("s", "s", "equal"),)
    ((row,), _) = compare_buffers(holding(s=scales), holding(s=short), 0)
    assert (row.relation, row.short, row.dtype) == ("rounded", 1, str(dtype).removeprefix("torch."))
    ((row,), _) = compare_buffers(holding(s=short), holding(s=(3 * scales.flip(0)).to(dtype)), 0)
    assert row.relation == "different"
    assert normprobe.diff(holding(s=short), holding(s=(scales + 1).to(dtype)), tokens()).differences


def test_scalars_and_buffers_without_elements() -> None:
    a = holding(scalar=torch.tensor(0.1), none=torch.ones(0))
    b = holding(scalar=torch.tensor(0.1).bfloat16(), none=torch.ones(0))
    ((row,), skipped) = compare_buffers(a, b, 0)
    assert (row.a, row.relation, row.short, row.dtype, skipped) == ("scalar", "rounded", 1, "bfloat16", ())


def test_buffers_that_are_registered_in_another_order() -> None:
    """Cosines and sines of one shape: their names belong together, and where those differ their values."""
    cos, sin = torch.cos(TABLE), torch.sin(TABLE)
    for names in (("sin", "cos"), ("s", "c")):
        other = holding(**{names[0]: sin, names[1]: cos})
        pairs, skipped = compare_buffers(holding(cos=cos, sin=sin), other, 0)
        assert {(pair.a, pair.b, pair.relation) for pair in pairs} == {
            ("cos", names[1], "equal"),
            ("sin", names[0], "equal"),
        }
        assert skipped == ()
    ((first, second), _) = compare_buffers(holding(cos=cos, sin=sin), holding(cos=sin, sin=cos), 0)
    assert (first.b, first.relation, second.relation) == ("cos", "different", "different")
    other = holding(s=sin, c=cos + 1)  # one pair is equal; what is left is compared with what is left
    pairs, _ = compare_buffers(holding(cos=cos, sin=sin), other, 0)
    assert {(pair.a, pair.b, pair.relation) for pair in pairs} == {("sin", "s", "equal"), ("cos", "c", "different")}
