"""What holds for every check: its page, its limits, its own fault, and what it does when it cannot look."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from normprobe.checks import ALL, Check, SweepCheck, Unit, documentation, find, run
from normprobe.records import (
    Anatomy,
    AttentionMeasure,
    Declared,
    Finding,
    HeadRows,
    Measurements,
    QKNorm,
    ReportData,
    Severity,
    Skipped,
    Stream,
    Target,
)
from normprobe.records.init import BlockedBranch
from tests.checks import builders as b

HEADINGS = ("What it measures", "Why it matters", "What to do", "When to ignore it", "References")
NAMES = {
    "NP101": "eps-outside-root",
    "NP102": "eps-vanishes-in-dtype",
    "NP104": "eps-differs-from-config",
    "NP103": "eps-dominates-signal",
    "NP105": "mixed-eps",
    "NP106": "half-precision-reduction",
    "NP107": "gain-after-downcast",
    "NP108": "name-contradicts-behaviour",
    "NP109": "uninitialised-gain",
    "NP110": "dead-gain",
    "NP111": "outlier-gain",
    "NP112": "doubled-offset",
    "NP113": "lost-norm-keys",
    "NP114": "norm-weight-decay",
    "NP115": "frozen-by-rounding",
    "NP116": "unfused-norm",
    "NP201": "missing-final-norm",
    "NP202": "doubled-final-norm",
    "NP203": "misplaced-final-norm",
    "NP204": "norm-on-trunk",
    "NP205": "deep-post-norm",
    "NP206": "mixed-placement",
    "NP207": "norm-twice",
    "NP208": "unused-norm",
    "NP301": "growth-above-sqrt",
    "NP302": "diluted-branches",
    "NP209": "lopsided-qk-norm",
    "NP210": "qk-norm-wrong-axis",
    "NP211": "deepnorm-incomplete",
    "NP212": "declared-not-computed",
    "NP213": "missing-branch-norm",
    "NP214": "norm-across-tokens",
    "NP303": "massive-activations",
    "NP304": "half-headroom",
    "NP305": "dead-branch",
    "NP306": "overwriting-branch",
    "NP307": "lost-in-rounding",
    "NP308": "collapsing-tokens",
    "NP309": "missing-skip",
    "NP401": "unresolved-logits",
    "NP402": "entropy-collapse",
    "NP403": "saturated-heads",
    "NP404": "attention-scale",
    "NP405": "qk-norm-advised",
    "NP406": "unbounded-logit-scale",
    "NP501": "gradient-imbalance",
    "NP502": "vanishing-gradient",
    "NP503": "exploding-gradient",
    "NP504": "non-finite",
    "NP601": "linear-gain-before-relu",
    "NP602": "unscaled-writers",
    "NP603": "recipe-not-applied",
    "NP604": "wrong-fan",
    "NP605": "constant-weight",
    "NP606": "blocked-gradient",
    "NP607": "width-dependent",
    "NP701": "train-eval-gap",
    "NP702": "small-batch",
    "NP703": "batch-norm-over-padding",
    "NP704": "unsynchronised-batch-norm",
    "NP705": "stale-statistics",
    "NP706": "thawing-batch-norm",
    "NP801": "zero-norm-weight",
    "NP802": "dyt-alpha",
    "NP803": "nfnet-scale",
    "NP804": "zero-variance-filter",
}
EPS = Declared(path=".", field="norm_eps", fact="eps", stated=1e-5, value=1e-5)
Q, K = (HeadRows(parameter=f"{name}.weight", heads=(((0, 4),), ((4, 8),))) for name in "qk")


def written(*branches: dict[str, Any], **more: Any) -> Stream:
    """A stream of writes that differ from pre-norm ones by what is given."""
    writes = tuple(b.branch(f"blocks.{i}", **facts) for i, facts in enumerate(branches))
    return b.stream(branches=writes, depth=len(writes), **more)


def post(depth: int) -> Stream:
    facts: dict[str, Any] = {"placement": "post", "pre_norm": None, "post_norm": "n"}
    return written(*[facts] * depth, placement="post", final_norm=None, needs_final_norm=False)


def uneven() -> Stream:
    facts: dict[str, Any] = {"placement": "deepnorm", "pre_norm": None, "post_norm": "n"}
    scales = [{"skip_scale": 2.0}, {"skip_scale": 2.0}, {"skip_scale": 3.0}]
    more: Any = {"placement": "deepnorm", "final_norm": None, "needs_final_norm": False}
    return written(*(facts | scale for scale in scales), **more)


def attended(measured: AttentionMeasure, **facts: Any) -> ReportData:
    """A document with this attention alone."""
    data = b.document(attention=(b.site(**facts),))
    return data.model_copy(update={"measurements": data.measurements.model_copy(update={"attention": (measured,)})})


FAULTS: dict[str, Callable[[], ReportData]] = {
    "NP101": lambda: b.document(norms=(b.norm(eps_placement="outside_sqrt"),)),
    "NP102": lambda: b.document(
        norms=(b.norm(kind="l2norm", eps=1e-12, eps_placement="clamp", class_name=""),), dtype="float16"
    ),
    "NP103": lambda: b.document(residual=(b.residual(entry_rms=1e-3),)),
    "NP105": lambda: b.document(
        norms=(b.norm(), b.norm("blocks.1.norm"), b.norm("blocks.2.norm", eps=1e-6)),
        streams=(b.stream(branches=tuple(b.branch(f"blocks.{i}") for i in range(3)), final_norm="blocks.0.norm"),),
    ),
    "NP104": lambda: b.document(declared=(Declared(path=".", field="norm_eps", fact="eps", stated=1e-6, value=1e-6),)),
    "NP106": lambda: b.document(norms=(b.norm(reduction="input"),)),
    "NP107": lambda: b.document(norms=(b.norm(weight_multiply="after_cast"),), dtype="bfloat16", norm_gains=()),
    "NP108": lambda: b.document(norms=(b.norm(class_name="T5LayerNorm"),)),
    "NP109": lambda: b.document(norm_gains=(b.gain(held=b.elements(non_finite=16)),)),
    "NP110": lambda: b.document(norm_gains=(b.gain(held=b.elements(value=0.0)),)),
    "NP111": lambda: b.document(norm_gains=(b.gain(held=b.moved(peak=400.0)),)),
    "NP112": lambda: b.document(norm_gains=(b.gain(held=b.moved(median=2.0), one_plus=True),)),
    "NP113": lambda: b.document(norm_gains=(b.gain(), b.gain("norm", b.moved())), init=b.init(0.1, trained=True)),
    "NP114": lambda: b.document(optimizer=b.optimizer(b.norm_step(), groups=(b.group(decay=1e-4),))),
    "NP115": lambda: b.document(optimizer=b.optimizer(b.norm_step(lost=1.0, dtype="bfloat16"))),
    "NP116": lambda: b.document(norms=(b.norm(fused=False, device="cuda"),), cost=b.cost(b.norm_cost(seconds=0.3))),
    "NP201": lambda: b.document(streams=(b.stream(final_norm=None),)),
    "NP202": lambda: b.document(norms=(b.norm("norm", role="final"), b.norm("again", role="head", follows="norm"))),
    "NP203": lambda: b.document(streams=(written({"placement": "post", "post_norm": "n"}, {}, final_norm=None),)),
    "NP204": lambda: b.document(streams=(written({"placement": "post", "post_norm": "n"}, {}, {}),)),
    "NP205": lambda: b.document(streams=(post(60),)),
    "NP206": lambda: b.document(streams=(written({}, {}, {"placement": "none", "pre_norm": None}),)),
    "NP213": lambda: b.document(
        streams=(
            written(
                *(
                    {"block": f"blocks.{i // 2}", **({"placement": "none", "kind": "attention"} if i % 2 else {})}
                    for i in range(4)
                )
            ),
        )
    ),
    "NP309": lambda: b.document(
        streams=tuple(
            b.stream(name=p, branches=(b.branch(p),), final_norm=f"{p}.n", unskipped=(f"{p}.w",))
            for p in ("blocks.0", "blocks.1", "blocks.2")
        )
    ),
    "NP207": lambda: b.document(norms=(b.norm("a"), b.norm("b", follows="a"))),
    "NP208": lambda: b.document(norms=(b.norm(role="unused", executed=False, executions=0),)),
    "NP301": lambda: b.document(residual=(b.residual(independent_rms=0.4),)),
    "NP302": lambda: b.document(residual=(b.residual(*(b.state(i, write_share=1e-4) for i in range(4))),)),
    "NP209": lambda: b.document(
        attention=(b.site(qk_norm=QKNorm(kind="rmsnorm", axis="head", query="q"), columns={"q": Q, "k": K}),)
    ),
    "NP210": lambda: b.document(attention=(b.site(qk_norm=QKNorm(kind="rmsnorm", axis="tokens", query="q", key="k")),)),
    "NP211": lambda: b.document(streams=(uneven(),)),
    "NP212": lambda: b.document(
        declared=(EPS, Declared(path=".", field="cap", fact="logit_softcap", stated=30.0, value=30.0))
    ),
    "NP214": lambda: b.document(
        norms=(b.norm(over_places=True, over_tokens=True),),
        streams=(b.stream(branches=(b.branch("blocks.0", kind="attention"),)),),
        attention=(b.site(causal=True),),
    ),
    "NP303": lambda: b.document(residual=(b.residual(massive=(b.massive(1000.0),)),)),
    "NP304": lambda: b.document(residual=(b.residual(b.state(0), b.state(1, 40000.0)),)),
    "NP305": lambda: b.document(residual=(b.residual(b.state(0), b.state(1, write_rms=0.0, write_max=0.0)),)),
    "NP306": lambda: b.document(
        residual=(b.residual(b.state(0), b.state(1), b.state(2, write_rms=15.0, write_ratio=15.0)),)
    ),
    "NP307": lambda: b.document(
        residual=(b.residual(b.state(0), b.state(1, bf16_loss=0.8), dtype="bfloat16"),), dtype="bfloat16"
    ),
    "NP308": lambda: b.document(
        residual=(b.residual(b.state(0, kind="attention"), b.state(1, kind="attention", token_cosine=0.999)),)
    ),
    "NP401": lambda: attended(b.logits(3.0, 71.0), qk_norm=QKNorm(kind="rmsnorm", axis="head")),
    "NP402": lambda: attended(b.logits(3.0, 4.0, entropy=0.05)),
    "NP403": lambda: attended(b.logits(3.0, 4.0, saturated=0.9)),
    "NP404": lambda: b.document(
        attention=tuple(b.site(f"blocks.{i}.attn", scale=0.5 if i else 2.0) for i in range(4))
    ).model_copy(update={"measurements": Measurements(output_finite=True)}),
    "NP406": lambda: attended(b.logits(3.0), scale=None, scale_parameter="tau", scale_bounded=False),
    "NP405": lambda: attended(b.logits(3.0, 30.0)),
    "NP501": lambda: b.document(gradients=b.sloping()),
    "NP502": lambda: b.document(gradients=b.gradients(sizes=(1e-5, 0.1))),
    "NP503": lambda: b.document(gradients=b.gradients(sizes=(200.0, 0.1))),
    "NP504": lambda: b.document(output_finite=False),
    "NP601": lambda: b.document(
        weights=tuple(b.weight_site(f"{i}.weight", source=f"{i - 1}.weight") for i in range(5)),
        init=b.drawn(*(b.weight(f"{i}.weight", followed_by="relu", moment=0.5) for i in range(5))),
    ),
    "NP602": lambda: b.unscaled(24),
    "NP603": lambda: b.document(init=b.drawn(b.weight(own=(0.1, (0.09, 0.11))))),
    "NP604": lambda: b.document(
        weights=tuple(b.weight_site(f"{i}.weight", output_axis=1) for i in range(2)),
        init=b.drawn(*(b.weight(f"{i}.weight", recipes=(), misread=("lecun",)) for i in range(2))),
    ),
    "NP605": lambda: b.document(init=b.drawn(b.weight(same_outputs=True))),
    "NP606": lambda: b.document(
        init=b.drawn(blocked=(BlockedBranch(stream="blocks", branch=0, path="blocks.0", zeros=("a", "b")),))
    ),
    "NP701": lambda: b.document(batchnorm=b.batchnorm(b.batch_norm(), train_eval_gap=0.9)),
    "NP702": lambda: b.document(batchnorm=b.batchnorm(b.batch_norm(count=1, training=True), training=True)),
    "NP703": lambda: b.document(batchnorm=b.batchnorm(b.batch_norm(padding=7))),
    "NP704": lambda: b.document(batchnorm=b.batchnorm(b.batch_norm(), processes=4)),
    "NP705": lambda: b.document(batchnorm=b.batchnorm(b.batch_norm(finite=False, kept=None))),
    "NP706": lambda: b.document(batchnorm=b.batchnorm(b.batch_norm(), training=True)),
    "NP801": lambda: b.document(reparametrizations=(b.normed_weight(),), computed_weights=(b.slices(empty=1),)),
    "NP802": lambda: b.document(
        norms=(b.norm(kind="dyt", class_name="DyT"),), bounded_norms=(b.bounded(saturated=0.9),)
    ),
    "NP803": lambda: b.document(streams=(b.unnormed(2),), residual=(b.residual(*b.given(1.0, 9.0)),)),
    "NP804": lambda: b.document(
        reparametrizations=(b.normed_weight(kind="weight_standardization"),), computed_weights=(b.slices(empty=1),)
    ),
}
SWEPT = {"NP607"}  # judge several models
# They ask what ran where and what is stated, which is known there.
PLACED = {f"NP{code}" for code in (202, 203, 204, 205, 206, 207, 208, 209, 210, 211, 212, 213, 214, 309)}
# Their subject is not there: a norm of a known kind, a computed weight, a stream that constants hold.
ABSENT = {"NP116", "NP406", "NP801", "NP802", "NP803", "NP804"}
NOT_FINITE: dict[str, Callable[[float], ReportData]] = {
    "NP701": lambda x: b.document(batchnorm=b.batchnorm(b.batch_norm(), train_eval_gap=x)),
    "NP705": lambda x: b.document(batchnorm=b.batchnorm(b.batch_norm(kept=b.kept(divergence=x)))),
    "NP109": lambda x: b.document(norm_gains=(b.gain(held=b.elements(peak=x)),)),
    "NP114": lambda x: b.document(optimizer=b.optimizer(b.norm_step(), groups=(b.group(decay=x),))),
    "NP115": lambda x: b.document(optimizer=b.optimizer(b.norm_step(lost=x))),
    "NP303": lambda x: b.document(residual=(b.residual(massive=(b.massive(x),)),)),
    "NP401": lambda x: b.document().model_copy(
        update={"measurements": Measurements(attention=(b.logits(3.0, x, bound=x),), output_finite=True)}
    ),
    "NP504": lambda x: b.document(residual=(b.residual(b.state(0), b.state(1, x)),)),
    "NP803": lambda x: b.document(streams=(b.unnormed(2),), residual=(b.residual(*b.given(1.0, x)),)),
}


OF_ONE = [check for check in ALL if not isinstance(check, SweepCheck)]


def codes(data: ReportData) -> set[str]:
    return {finding.code for finding in run(data)[0]}


def each(check: Check) -> str:
    return check.code


def test_codes_and_names_are_those_of_the_design_and_unique() -> None:
    assert {check.code: check.name for check in ALL} == NAMES
    assert len(ALL) == len(NAMES) == len({check.name for check in ALL})
    assert FAULTS.keys() == NAMES.keys() - SWEPT
    assert {check.code for check in ALL if isinstance(check, SweepCheck)} == SWEPT


@pytest.mark.parametrize("check", ALL, ids=each)
def test_facts(check: Check) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", check.name)
    assert re.fullmatch(r"\d+\.\d+\.\d+", check.since)
    assert isinstance(check.severity, Severity)
    assert check.needs.words()
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        check.code = "NP999"  # type: ignore[misc]


@pytest.mark.parametrize("check", ALL, ids=each)
def test_the_docstring_is_a_page(check: Check) -> None:
    page = check.page()
    assert re.fullmatch(r"[A-Z].{20,98}\.", check.summary())
    assert re.findall(r"^## (.+)$", page, re.M) == list(HEADINGS)
    assert all(len(text.strip()) > 20 for text in re.split(r"^## .+$", page, flags=re.M))
    assert documentation(check).startswith(f"# {check.code} {check.name}\n")


@pytest.mark.parametrize("check", ALL, ids=each)
def test_every_number_that_is_compared_is_a_limit_with_unit_and_source(check: Check) -> None:
    assert [item.name for item in check.limits()] == [item.name for item in dataclasses.fields(check)]
    for item in check.limits():
        assert math.isfinite(item.value)
        assert item.unit in [unit.value for unit in Unit]
        assert len(item.source) > 10
        assert f"`{item.name}`" in documentation(check)
        assert item.source in documentation(check)


def test_the_healthy_document_raises_nothing_and_skips_nothing() -> None:
    assert run(b.document()) == ((), ())
    assert run(b.document(dtype="bfloat16")) == ((), ())


# In these documents no rewrite mends it: the eps is of a trained model, one layer has another factor, the class draws
# by a recipe of its own, and what is 0 is no weight.
NOT_MENDED = {"NP103", "NP211", "NP603", "NP606"}


@pytest.mark.parametrize("code", FAULTS)
def test_its_own_fault_raises_its_own_code(code: str) -> None:
    found = [finding for finding in run(FAULTS[code]())[0] if finding.code == code]
    assert len(found) == 1
    (finding,) = found
    assert finding.name == NAMES[code]
    assert finding.severity.rank >= find(code).severity.rank
    assert finding.source
    assert finding.where
    assert finding.fix == (None if code in NOT_MENDED else find(code).fix)
    assert [fix.rewrite for fix in finding.fixes][:1] == [name for name in [finding.fix] if name is not None]
    assert ReportData.model_validate_json(ReportData(findings=(finding,)).model_dump_json()).findings


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_its_fault_raises_no_other_code(code: str) -> None:
    assert codes(FAULTS[code]()) == {code}


@pytest.mark.parametrize("check", OF_ONE, ids=each)
@pytest.mark.parametrize("level", ["structure", "forward", "backward"])
def test_nothing_known_is_skipped_and_never_silence(check: Check, level: str) -> None:
    empty = ReportData(level=level, target=Target(), anatomy=Anatomy(), measurements=Measurements())
    outcomes = list(check.run(empty))
    assert outcomes
    assert all(isinstance(item, Skipped) and item.what.startswith(check.code) and item.why for item in outcomes)


@pytest.mark.parametrize("check", OF_ONE, ids=each)
def test_unknown_facts_are_skipped_or_pass_on_purpose(check: Check) -> None:
    facts = {"eps_placement": "unknown", "reduction": "unknown", "weight_multiply": "unknown"}
    unknown = b.norm(kind="unknown", eps=None, class_name="LayerNorm", **facts)
    data = b.document(
        norms=(unknown,),
        streams=(b.stream(final_norm=None, needs_final_norm=None, final_norm_reason="features are pooled"),),
        residual=(),
        attention=(b.site(scale=None),),
        output_finite=None,
        dtype="float16",
    ).model_copy(update={"measurements": Measurements()})
    outcomes = list(check.run(data))
    assert not any(isinstance(item, Finding) for item in outcomes)
    assert outcomes or check.code in PLACED | ABSENT


LEFT = {
    "NP401": "a logit is NaN, or queries or keys are not finite (NP504)",
    "NP705": "the batch that it was given is not finite (NP504)",
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("code", NOT_FINITE)
def test_what_is_not_finite_never_passes(code: str, value: float) -> None:
    found, skipped = run(NOT_FINITE[code](value))
    if code in LEFT and math.isnan(value):  # left to NP504, and said so
        assert LEFT[code] in [one.why for one in skipped if one.what.startswith(code)]
    else:
        assert code in {finding.code for finding in found}


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_stream_has_no_headroom(value: float) -> None:
    assert "NP304" in codes(b.document(residual=(b.residual(b.state(0, value)),)))


@pytest.mark.parametrize("check", [c for c in ALL if "forward" in c.needs.words()], ids=each)
def test_a_check_of_the_signal_says_that_the_level_is_too_low(check: Check) -> None:
    (skipped,) = check.run(FAULTS[check.code]().model_copy(update={"level": "structure"}))
    assert isinstance(skipped, Skipped)
    needed = "gradients" if "backward" in check.needs.words() else "a measured forward pass"
    assert f"needs {needed}" in skipped.why
