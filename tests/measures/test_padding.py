"""Padding is read from the caller's masks and has no part in any number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normprobe import probe
from normprobe.measures.forward import measure_forward
from normprobe.measures.padding import counted, fitting, padding_masks, sampled
from tests.measures.models import anatomy_of, bert, llama, t5

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def test_masks_of_both_conventions() -> None:
    inputs = {"input_ids": LEFT, "attention_mask": LEFT, "src_key_padding_mask": LEFT.bool(), "other": LEFT}
    first, second = padding_masks(inputs)
    assert torch.equal(first, LEFT == 0)
    assert torch.equal(second, LEFT.bool())


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3), torch.full((2, 3), 2), torch.ones(2, 1, 3, 3)]
)
def test_what_hides_nothing_or_is_no_mask_of_tokens(mask: torch.Tensor) -> None:
    assert padding_masks({"attention_mask": mask}) == ()
    assert padding_masks((mask,)) == ()


def test_two_masks_that_differ_say_nothing() -> None:
    mask = LEFT == 0
    assert fitting([mask, mask.clone()], (2, 6)) is mask
    assert fitting([mask, ~mask], (2, 6)) is None
    assert fitting([mask], (2, 5)) is None


@pytest.mark.parametrize("build", [llama, bert])
def test_what_stands_in_padding_changes_no_number(build: object) -> None:
    case = build()  # type: ignore[operator]
    ids = case.inputs["input_ids"][:, :6].expand(2, 6).clone()
    anatomy = anatomy_of(case.model, {"input_ids": ids, "attention_mask": LEFT})
    found = []
    for filler in (1, 7):
        padded = ids.masked_fill(LEFT == 0, filler)
        measured, skipped = measure_forward(case.model, {"input_ids": padded, "attention_mask": LEFT}, anatomy)
        assert skipped == ()
        assert measured.residual[0].basis.count == 10
        found.append(measured)
    assert found[0] == found[1]


@pytest.mark.parametrize("ones", [False, True])
def test_the_mask_of_one_of_two_sequences_of_one_shape_hides_nothing_and_that_is_said(ones: bool) -> None:
    case = t5()
    ids = case.inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    given = {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask}
    if ones:
        given["decoder_attention_mask"] = torch.ones_like(ids)
    report = probe(case.model, given)
    assert {stream.basis.count for stream in report.residual} == {ids.numel()}
    (skip,) = [one for one in report.skipped if one.what.startswith("padding")]
    assert (skip.what, "different masks" in skip.why) == (f"padding of {ids.shape[0]} × {ids.shape[1]} tokens", True)
    shorter = given | {"decoder_input_ids": ids[:, :-1], "decoder_attention_mask": torch.ones_like(ids[:, :-1])}
    counts = {stream.stream: stream.basis.count for stream in probe(case.model, shorter).residual}
    assert counts == {"encoder.block": ids.numel() - 5, "decoder.block": ids[:, :-1].numel()}


def padded(token: int) -> Any:
    """The four measures of a causal model on two rows, of which one ends with five tokens of padding."""
    case = llama()
    with torch.no_grad():
        case.model.model.embed_tokens.weight[7] *= 50
    ids, mask = case.inputs["input_ids"].clone(), torch.ones_like(case.inputs["input_ids"])
    ids[ids == 7] = 6
    ids[1, 7:], mask[1, 7:] = token, 0
    names = ("norms", "products", "precision", "jacobian")
    return probe(case.model, {"input_ids": ids, "attention_mask": mask}, measures=names).data.measurements


def test_what_padding_holds_changes_no_measure() -> None:
    plain, large = padded(5), padded(7)
    for name in ("norms", "products", "jacobian"):
        assert getattr(plain, name) == getattr(large, name), name
    for one, other in zip(plain.precision.passes, large.precision.passes, strict=True):
        for a, b in zip(one.places, other.places, strict=True):
            assert a.error == pytest.approx(b.error, rel=0.05), "a cast product rounds rows of other sizes otherwise"
            assert a.count == b.count
    assert {curve.basis.count for curve in plain.norms.norms} == {19 * 32}
    (whole,) = plain.jacobian.output
    assert whole.inputs == 19 * 32


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((2, 3, 4), 16), ((2, 5, 3, 2), 40), ((6, 4), 16), ((2, 4, 3), 16), ((2, 5), None), ((3, 2, 4), None)],
)
def test_the_axis_of_tokens_is_found(shape: tuple[int, ...], kept: int | None) -> None:
    mask = torch.tensor([[False, False, True], [False, False, True]])
    seen = counted([mask], shape)
    assert (None if seen is None else int(seen.expand(shape).sum())) == kept
    at, total = sampled(shape, 0, 1000, [mask])
    assert total == len(at) == (kept or torch.Size(shape).numel())
    if seen is not None:
        assert bool(seen.expand(shape).reshape(-1)[at].all())
