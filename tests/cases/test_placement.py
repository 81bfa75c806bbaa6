"""Cases from the field: where norms sit, and what attention norms."""

from __future__ import annotations

import pytest
import torch

import normprobe
from tests.cases.field import case, codes, only, report

LOUD = "error", "warning"


def test_c09_a_final_norm_that_was_lost() -> None:
    broken, right = report("c09"), report("c09", False)
    finding = only(broken, "NP201")
    assert finding.severity.value == "error"
    assert finding.value == pytest.approx(7.4, abs=0.1)
    assert right.anatomy.streams[0].final_norm == "model.decoder.final_layer_norm"
    assert not codes(right, *LOUD)


def test_c10_a_post_norm_stack_needs_no_final_norm() -> None:
    found = report("c10")
    assert [s.placement for s in found.anatomy.streams] == ["post"]
    assert not codes(found, *LOUD)


def test_c12_a_norm_of_a_norm() -> None:
    found = report("c12")
    doubled = [f for f in found.findings if f.code == "NP202"]
    assert {f.where for f in doubled} == {"encoder.norm", "decoder.norm"}
    assert {f.severity.value for f in doubled} == {"note"}
    assert "NP202" not in codes(report("c12", True))


@pytest.mark.parametrize(
    ("name", "argument", "placement"),
    [("c53", "llama", "pre"), ("c53", "olmo2", "output"), ("c53", "gemma2", "sandwich"), ("c10", None, "post")],
)
def test_c53_the_same_name_at_three_places(name: str, argument: str | None, placement: str) -> None:
    found = report(name, *([] if argument is None else [argument]))
    assert {s.placement for s in found.anatomy.streams} == {placement}
    assert not codes(found, *LOUD)


@pytest.mark.parametrize("parallel", [True, False])
def test_c48_one_flag_makes_branches_parallel(parallel: bool) -> None:
    found = report("c48", parallel)
    assert {b.parallel for b in found.anatomy.streams[0].branches} == {parallel}
    assert not codes(found, *LOUD)


@pytest.mark.parametrize(("kind", "axis", "sizes"), [("qwen3", "head", {8}), ("olmo2", "full", {32, 16})])
def test_c28_what_a_qk_norm_runs_over(kind: str, axis: str, sizes: set[int]) -> None:
    found = report("c28", kind)
    for site in found.anatomy.attention:
        assert site.qk_norm is not None
        assert site.qk_norm.axis == axis
    assert {n.size for n in found.anatomy.norms if n.role in ("query", "key")} == sizes
    assert not codes(found, *LOUD)


def test_c61_a_gain_for_each_head() -> None:
    found = report("c61")
    norms = [n for n in found.anatomy.norms if n.role in ("query", "key")]
    assert {(n.kind, n.size, n.affine) for n in norms} == {("layernorm", 8, "weight")}
    assert {site.qk_norm.axis for site in found.anatomy.attention if site.qk_norm} == {"head"}
    assert not codes(found, *LOUD)


def test_c42_normed_queries_and_keys_with_a_scale_of_1() -> None:
    full, scaled = report("c42", 1.0), report("c42", 256**-0.5)
    head, right = full.attention[0].heads[0], scaled.attention[0].heads[0]
    assert head.std / right.std == pytest.approx(16, rel=0.01)
    assert head.entropy < 0.2 < right.entropy
    assert "NP404" in codes(full)
    assert not codes(scaled, *LOUD)


def test_c16_the_fused_encoder_path_hides_nothing() -> None:
    found = report("c16")
    assert len(found.anatomy.norms) == 4
    assert len(found.anatomy.attention) == 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_c17_attention_is_seen_though_its_projection_is_never_called() -> None:
    module, x = case("c17").build()
    found = normprobe.probe(module, (x, x, x))
    assert [site.heads for site in found.anatomy.attention] == [2]


def test_c30_states_have_the_shape_of_the_stream() -> None:
    found = report("c30")
    assert found.anatomy.streams[0].width == 32
    assert {m.basis.count for m in found.residual} == {36}
