"""Cases from the field: the residual stream, initialisation, batch norms, and what a probe must leave alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import normprobe
from normprobe.errors import NormprobeError
from tests.cases.field import case, codes, only, report

LOUD = "error", "warning"


def test_c08_the_sum_overflows_though_no_branch_does() -> None:
    found = report("c08")
    assert only(found, "NP304").where == "layers.1"
    assert "add" in only(found, "NP504").message
    wide = report("c08", torch.bfloat16)
    assert not codes(wide, "error")


def test_c51_massive_activations_are_no_divergence() -> None:
    found = report("c51")
    massive = found.residual[0].massive[0]
    assert (massive.position, massive.channel) == (0, 9)
    assert massive.ratio > 100
    assert only(found, "NP303").severity.value == "note"
    assert not codes(found, *LOUD)


def test_c13_writers_that_were_not_scaled_by_depth() -> None:
    skipped, scaled = report("c13"), report("c13", False)
    finding = only(skipped, "NP603")
    assert finding.value == pytest.approx(4.9, abs=0.05)
    assert len(finding.places) == 24
    assert not codes(scaled) & {"NP602", "NP603"}


def test_c19_checkpointing_moves_no_statistics_while_probing() -> None:
    model, x = case("c19").build()
    normprobe.probe(model, x, level="backward")
    assert int(model.body[1].num_batches_tracked) == 0
    assert model.training


def test_c32_one_value_a_channel() -> None:
    model, x = case("c32").build()
    before = [b.clone() for b in model.buffers()]
    found = normprobe.probe(model, x)
    assert "NP702" in codes(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_c59_stale_statistics() -> None:
    assert "NP705" in codes(report("c59"))
    model, x = case("c59").build(momentum=1.0)
    model.train()(x)
    found = normprobe.probe(model.eval(), x)
    assert not codes(found, *LOUD)


def test_c67_statistics_that_fit_are_no_finding() -> None:
    assert not codes(report("c67"), *LOUD)


@pytest.mark.parametrize("name", ["c22", "c37"])
def test_sound_models_are_clean(name: str) -> None:
    assert not codes(report(name), *LOUD)


def test_c36_a_raw_stream_is_a_note_and_a_post_norm_stream_is_sound() -> None:
    assert {f.code for f in report("c36").findings if f.severity.value in LOUD} == set()
    assert not codes(report("c36", True), *LOUD)


def test_c50_no_hook_and_no_model_is_kept() -> None:
    boom, x = case("c50").build(True)
    with pytest.raises(NormprobeError):
        normprobe.probe(boom, x)
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in boom.modules())
    model, x = case("c50").build()
    found, alive = normprobe.probe(model, x, level="backward"), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert found.anatomy.norms
