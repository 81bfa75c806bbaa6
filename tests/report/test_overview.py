from __future__ import annotations

import math

import pytest

from normprobe.records import (
    Anatomy,
    BranchScale,
    Finding,
    Head,
    MassiveActivation,
    QKNorm,
    Reparametrization,
    ReportData,
    Severity,
    Skipped,
    Target,
)
from normprobe.report.facts import attention_facts, norm_kinds
from normprobe.report.groups import finding_groups, skipped_groups
from normprobe.report.overview import headline, leftover_facts, owner, stream_facts, stream_lines
from normprobe.report.render import document
from normprobe.report.series import charts, largest
from normprobe.report.streams import stream_title
from tests.report import examples
from tests.report.builders import norm, norms_of, site, stream


def test_a_stream_in_short_facts() -> None:
    anatomy = examples.clean().anatomy
    assert stream_lines(anatomy, anatomy.streams[0]) == [
        ["pre-norm", "30 blocks, 60 branches (30 attention, 30 MLP)", "width 576"],
        ["RMSNorm eps 1e-05", "final norm model.norm"],
        ["attention 9 heads (3 kv) × 64, scale 0.125, no QK-Norm"],
    ]


@pytest.mark.parametrize(
    ("needs", "final", "reason", "text"),
    [
        (True, "norm", "", "final norm norm"),
        (True, None, "", "NO final norm"),
        (False, None, "pooled", "needs no final norm (pooled)"),
        (None, None, "no head", "final norm not decided (no head)"),
    ],
)
def test_the_final_norm_is_named_or_its_absence_explained(
    needs: bool | None, final: str | None, reason: str, text: str
) -> None:
    one = stream("h", 2, final=final, needs=needs, final_norm_reason=reason)
    assert text in stream_facts(Anatomy(streams=(one,)), one)


def test_mixed_placement_is_counted() -> None:
    one = stream("h", 2, placement="pre")
    mixed = one.branches[0].model_copy(update={"placement": "none"})
    one = one.model_copy(update={"placement": "mixed", "branches": (mixed, *one.branches[1:])})
    assert "mixed placement (3 pre-norm, 1 without norms)" in stream_facts(Anatomy(streams=(one,)), one)


def test_scales_other_than_one_are_said() -> None:
    one = stream("h", 1, input_multiplier=None)
    scales = (BranchScale(kind="constant", value=0.22), BranchScale(kind="gate"))
    branches = tuple(
        branch.model_copy(update={"branch_scale": scale, "skip_scale": skip})
        for branch, scale, skip in zip(one.branches, scales, (1.5, None), strict=True)
    )
    one = one.model_copy(update={"branches": branches})
    facts = stream_facts(Anatomy(streams=(one,)), one)
    assert "stream input × a factor that is learned or not known without weights" in facts
    assert "skip scale 1.5, not constant" in facts
    assert "branch scale 0.22, gated" in facts


def test_constant_scales_are_one_range_on_both_sides() -> None:
    one = stream("h", 1)
    branches = tuple(
        branch.model_copy(update={"branch_scale": BranchScale(kind="constant", value=value), "skip_scale": skip})
        for branch, value, skip in zip(one.branches, (0.6, 0.707), (0.8, 0.707), strict=True)
    )
    one = one.model_copy(update={"branches": branches})
    facts = stream_facts(Anatomy(streams=(one,)), one)
    assert "skip scale 0.707–0.8" in facts
    assert "branch scale 0.6–0.707" in facts


def test_norms_between_the_weights_of_a_branch_are_said_to_be_inside() -> None:
    one = stream("h", 2, placement="none", kinds=("conv",), final=None)
    bare = [branch.model_copy(update={"pre_norm": None}) for branch in one.branches]
    normed = bare[0].model_copy(update={"parameters": ("h.0.c.weight", "h.0.n.weight")})
    anatomy = Anatomy(norms=(norm("h.0.n", role="inner", weight="h.0.n.weight"),))
    none, some, all_ = ({"branches": tuple(b)} for b in (bare, [normed, bare[1]], [normed, normed]))
    assert "no norm on the branches" in stream_facts(anatomy, one.model_copy(update=none))
    assert "norms inside 1 of 2 branches" in stream_facts(anatomy, one.model_copy(update=some))
    assert "norms inside the branches" in stream_facts(anatomy, one.model_copy(update=all_))


def test_norms_inside_the_branches_belong_to_the_stream() -> None:
    one = stream("h", 1, kinds=("conv",))
    used = one.branches[0].model_copy(update={"parameters": ("h.0.n.weight",)})
    one = one.model_copy(update={"branches": (used,)})
    inner = [norm(f"h.0.{name}", role="inner", weight=f"h.0.{name}.weight") for name in ("n", "other")]
    anatomy = Anatomy(streams=(one,), norms=tuple(inner))
    assert "1 inner norm (RMSNorm eps 1e-05)" in stream_facts(anatomy, one)
    assert leftover_facts(anatomy) == ["1 norm off the streams (1 inner)"]


def test_a_finding_at_the_root_is_placed_at_the_class() -> None:
    data = ReportData(target=Target.model_validate({"class": "Net"}), findings=(finding("NP100", 1.0, "."),))
    for form in ("rich", "html", "markdown"):
        assert "Net" in document(data, form).partition("NP100")[2].partition("measured")[0]


def test_blocks_are_not_counted_where_no_module_tells_them_apart() -> None:
    one = stream("h", 1)
    rooted = tuple(branch.model_copy(update={"block": "."}) for branch in one.branches)
    facts = stream_facts(Anatomy(), one.model_copy(update={"branches": rooted}))
    assert "2 branches (1 attention, 1 MLP)" in facts


def test_other_readers_of_the_stream_are_said() -> None:
    raw, normed = (stream("h", 2, raw_readers=("h2", "out.1"), placement=kind) for kind in ("pre", "post"))
    assert "also read without a norm by h2, out.1" in stream_facts(Anatomy(), raw)
    assert "also read by h2, out.1" in stream_facts(Anatomy(), normed)


def test_a_stream_of_no_container_is_called_by_the_class() -> None:
    data = ReportData(target=Target.model_validate({"class": "Net"}))
    assert [stream_title(data, name) for name in (".", ".#2", "h")] == ["Net", "Net#2", "h"]
    assert stream_title(ReportData(), ".") == "the model"


def test_different_norms_are_counted() -> None:
    norms = [norm("a", eps=1e-6), norm("b", eps=1e-6), norm("c", kind="layernorm", eps=1e-5)]
    assert norm_kinds(norms) == ["2 × RMSNorm eps 1e-06 + 1 × LayerNorm eps 1e-05"]
    assert norm_kinds([norm("a", eps_placement="outside_sqrt")]) == ["RMSNorm eps 1e-05 outside the root"]
    assert norm_kinds([norm("a", kind="groupnorm", groups=1)]) == ["GroupNorm 1 group eps 1e-05"]
    assert norm_kinds([norm("a", kind="batchnorm", frozen=True)]) == ["frozen BatchNorm eps 1e-05"]
    assert norm_kinds([norm("a", kind="layernorm", unbiased=True)]) == ["LayerNorm by the unbiased deviation eps 1e-05"]
    assert norm_kinds([]) == []


def test_attention_layouts() -> None:
    both = QKNorm(kind="rmsnorm", axis="full", query="q", key="k", rope="after")
    assert attention_facts([site("a", qk_norm=both, softcap=50.0, sinks=True)]) == [
        "attention 9 heads (3 kv) × 64, scale 0.125, QK-Norm RMSNorm over all heads after rotary, "
        "soft-capped at 50, sinks"
    ]
    lone = QKNorm(kind="l2norm", axis="unknown", query="q")
    assert "QK-Norm L2Norm on an unknown axis on q only" in attention_facts([site("a", qk_norm=lone)])[0]
    windows = [site("a", window=64), site("b"), site("c")]
    assert attention_facts(windows)[0].endswith("window 64 at 1 of 3")
    own = [site(f"h.{i}.a", scale=8.0 + i, scale_parameter=f"h.{i}.a.t") for i in range(3)]
    assert attention_facts(own) == ["attention 9 heads (3 kv) × 64, scale 8–10 (h.0–2.a.t), no QK-Norm"]
    learned = site("a", scale=None, scale_parameter="tau")
    assert "scale not constant (tau)" in attention_facts([learned])[0]


def test_a_site_belongs_to_the_closest_block() -> None:
    outer, inner = stream("net", 2), stream("net.1.inner", 2)
    anatomy = Anatomy(streams=(outer, inner))
    assert owner(anatomy, "net.1.attn") is anatomy.streams[0]
    assert owner(anatomy, "net.1.inner.0.attn") is anatomy.streams[1]
    assert owner(anatomy, "net.11.attn") is None


def test_a_site_belongs_to_the_stream_of_a_branch_that_has_its_weights() -> None:
    one = stream(".", 1)
    written = one.branches[0].model_copy(update={"block": ".", "parameters": ("b.0.q.weight",)})
    anatomy = Anatomy(streams=(one.model_copy(update={"branches": (written,)}),))
    assert owner(anatomy, "b.0") is anatomy.streams[0]
    assert owner(anatomy, "b.1") is None


def test_what_lies_off_the_streams_is_not_lost() -> None:
    one = stream("h", 1)
    anatomy = Anatomy(
        streams=(one,),
        norms=(*norms_of(one), norm("extra", "inner"), norm("spare", "unused")),
        attention=(site("pooler"),),
        reparametrizations=(Reparametrization(path="w", kind="weight_norm"),),
        head=Head(path="lm_head", tied_to="embed.weight", logit_multiplier=0.5, softcap=30.0),
    )
    assert leftover_facts(anatomy) == [
        "2 norms off the streams (1 inner, 1 unused)",
        "attention 9 heads (3 kv) × 64, scale 0.125, no QK-Norm (off the streams)",
        "computed weights: 1 weight norm",
        "head lm_head, tied to embed.weight",
        "logits × 0.5",
        "logits soft-capped at 30",
    ]


def finding(code: str, value: float | str | None, where: str = "m", **more: object) -> Finding:
    fields = {"code": code, "name": "n", "severity": Severity.ERROR, "message": "m", "source": "choice"}
    return Finding.model_validate({**fields, "value": value, "where": where, **more})


def test_groups_keep_every_place_once_and_the_range_of_values() -> None:
    found = [finding("NP100", 3.0, "b"), finding("NP100", 1.0, "a", places=("a", "b", "c"))]
    (group,) = finding_groups(found)
    assert group.places == ("b", "a", "c")
    assert group.evidence == ["measured 1 to 3", "source: choice"]
    assert group.others == 0


def test_a_value_that_is_not_finite_stays_visible_in_a_group() -> None:
    (group,) = finding_groups([finding("NP100", math.nan), finding("NP100", 1.0), finding("NP100", math.inf)])
    assert group.evidence[0] == "measured 1 to ∞, 1 × nan"
    (group,) = finding_groups([finding("NP100", math.nan)])
    assert group.evidence[0] == "measured nan"


def test_the_same_code_with_another_severity_is_another_group() -> None:
    note = finding("NP100", 1.0, severity=Severity.NOTE)
    groups = finding_groups([note, finding("NP100", 1.0), finding("NP200", 1.0)])
    assert [(group.severity.value, group.first.code) for group in groups] == [
        ("error", "NP100"),
        ("error", "NP200"),
        ("note", "NP100"),
    ]


def test_groups_of_one_severity_come_as_their_findings_do() -> None:
    groups = finding_groups([finding("NP200", 1.0), finding("NP100", 1.0), finding("NP200", 2.0)])
    assert [group.first.code for group in groups] == ["NP200", "NP100"]


def test_skips_with_one_reason_share_a_line() -> None:
    skipped = [Skipped(what="a", why="x"), Skipped(what="b", why="y"), Skipped(what="c", why="x")]
    assert skipped_groups(skipped) == [(("a", "c"), "x"), (("b",), "y")]


def test_the_largest_massive_activations_are_shown_and_the_others_counted() -> None:
    found = [
        MassiveActivation(channel=c, position=0, value=v, ratio=500.0, share=0.5, first=0, last=c)
        for c, v in enumerate((10.0, -900.0, 30.0, 20.0, 800.0))
    ]
    data = examples.clean()
    residual = data.measurements.residual[0].model_copy(update={"massive": tuple(found)})
    measurements = data.measurements.model_copy(update={"residual": (residual,)})
    captions = charts(data.model_copy(update={"measurements": measurements}))[0].series[0].captions
    assert "largest |x| 1279 after write 60" in captions[0]
    assert captions[4][1:] == ("500 × the median", "50% of its token's squared norm")
    assert [caption[0] for caption in captions[4:]] == [
        "massive: -900 in channel 1, position 0, writes 1–2",
        "massive: 800 in channel 4, position 0, writes 1–5",
        "massive: 30 in channel 2, position 0, writes 1–3",
        "and 2 more massive activations",
    ]


def test_the_first_value_that_is_not_finite_counts_as_the_largest() -> None:
    assert largest([1.0, 3.0, 2.0]) == 1
    assert largest([1.0, 9.0, math.nan, math.inf]) == 2


def test_the_target_line_says_which_autocast_was_in_force() -> None:
    plain = ReportData(target=Target(name="m", dtype="float32", device="cpu"))
    mixed = plain.model_copy(update={"target": plain.target.model_copy(update={"autocast": "bfloat16"})})
    assert headline(plain) == ["float32", "cpu"]
    assert headline(mixed) == ["float32", "autocast bfloat16", "cpu"]
