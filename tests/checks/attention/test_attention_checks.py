"""NP402 to NP405, on documents."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import (
    AttentionMeasure,
    AttentionSite,
    Declared,
    Finding,
    HeadRows,
    Margins,
    QKNorm,
    ReportData,
    Skipped,
)
from normprobe.records.init import Initialisation
from tests.checks import builders as b

NAN = math.nan


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, [find(code)])


def attended(
    *measured: AttentionMeasure, sites: tuple[AttentionSite, ...] | None = None, trained: bool | None = None
) -> ReportData:
    """A document with these measures, of sites at their paths."""
    init = Initialisation(trained=trained, evidence=(), writes=(), roles=(), weights=())
    data = b.document(attention=sites or tuple(b.site(one.path) for one in measured), init=init)
    return data.model_copy(update={"measurements": data.measurements.model_copy(update={"attention": measured})})


def margins(width: float) -> Margins:
    return Margins(std=width, entropy=width, saturated=width, first_token=width)


def test_np402_names_the_site_with_the_lowest_entropy() -> None:
    low = b.logits(3.0, 4.0, path="blocks.1.attn", entropy=0.05)
    data = attended(b.logits(3.0), low, b.logits(3.0, path="blocks.2.attn", entropy=0.1))
    (found,), skipped = judge("NP402", data)
    assert skipped == ()
    assert (found.where, found.value, found.limit, found.severity.value) == ("blocks.1.attn", 0.05, 0.15, "warning")
    assert found.places == ("blocks.1.attn", "blocks.2.attn")
    assert found.message == (
        "the mean entropy of 2 heads is at most 0.05 of that of uniform attention, with 0.1 of the probability on the "
        "first key or a sink; 2 of 3 attention sites have collapsed"
    )


@pytest.mark.parametrize(
    "heads",
    [
        {"entropy": 0.15},
        {"entropy": 0.1, "margins": margins(0.06)},  # the sample leaves it open
        {"entropy": 0.05, "first_token": 0.51},
        {"entropy": 0.05, "first_token": 0.3, "sink": 0.3},
    ],
)
def test_np402_passes_what_is_not_sure_and_what_is_parked_on_the_first_key(heads: dict[str, Any]) -> None:
    assert judge("NP402", attended(b.logits(3.0, 4.0, **heads))) == ((), ())


@pytest.mark.parametrize(("code", "field"), [("NP402", "entropy"), ("NP403", "saturated")])
def test_rows_that_tell_nothing_are_skipped(code: str, field: str) -> None:
    found, (skipped,) = judge(code, attended(b.logits(3.0, **{field: NAN})))
    assert found == ()
    assert skipped.why == "no row sees two keys, or a logit is NaN (NP504)"


@pytest.mark.parametrize("code", ["NP402", "NP403", "NP405"])
def test_a_site_without_measure_is_skipped(code: str) -> None:
    found, (skipped,) = judge(code, attended(sites=(b.site("a.attn"),)))
    assert (found, skipped.why) == ((), "its logits were not measured")


def heads(*saturated: float, **more: Any) -> AttentionMeasure:
    one = b.logits(*[3.0] * len(saturated))
    told = (head.model_copy(update={"saturated": s, **more}) for head, s in zip(one.heads, saturated, strict=True))
    return one.model_copy(update={"heads": tuple(told)})


def test_np403_counts_the_heads_of_the_model() -> None:
    (found,), _ = judge("NP403", attended(heads(*[0.0] * 7, 0.9), heads(0.6)))
    assert (found.value, found.limit, found.severity.value) == (2 / 9, 0.1, "warning")
    assert found.message.startswith(
        "2 of 9 heads are saturated; head 7 of this site gives one key more than 99 % in 90 %"
    )
    (found,), _ = judge("NP403", attended(heads(0.9), trained=True))
    assert found.severity.value == "note"


@pytest.mark.parametrize(
    "measure",
    [
        heads(*[0.0] * 9, 0.9),
        heads(0.5),
        heads(0.6, margins=margins(0.1)),
        heads(0.9, first_token=0.6),
        heads(0.9, first_token=0.2, sink=0.4),
    ],
)
def test_np403_passes_a_few_and_those_on_the_first_key(measure: AttentionMeasure) -> None:
    assert judge("NP403", attended(measure)) == ((), ())


def scaled(*scales: float | None, std: float = 0.1, trained: bool | None = False, **facts: Any) -> ReportData:
    """Sites of head width 16 in one block each, with these scales."""
    defaults: dict[str, Any] = {"head_dim": 16, "heads": 4}
    sites = tuple(b.site(f"blocks.{i}.attn", **defaults | {"scale": s} | facts) for i, s in enumerate(scales))
    return attended(*(b.logits(1.0, path=site.path, std=std) for site in sites), sites=sites, trained=trained)


@pytest.mark.parametrize("scales", [(0.25, 1.0, 0.25), (0.25, 0.25, 0.25, 0.0625), (1.0, 1.0, 0.25, 1.0)])
def test_np404_finds_the_one_that_differs(scales: tuple[float, ...]) -> None:
    found, _ = judge("NP404", scaled(*scales, std=1.0))
    (warning,) = [f for f in found if f.severity.value == "warning"]
    odd = next(i for i, s in enumerate(scales) if scales.count(s) == 1)
    assert warning.where == f"blocks.{odd}.attn"
    assert isinstance(warning.value, float)
    assert warning.value == pytest.approx(scales[odd] / scales[odd - 1])
    assert "that of the other sites like it is" in warning.message


@pytest.mark.parametrize("trained", [None, False, True])
def test_np404_notes_a_scale_that_some_models_mean(trained: bool | None) -> None:
    (found,), _ = judge("NP404", scaled(1.0, 1.0, trained=trained))
    assert (found.severity.value, found.value) == ("note", 4.0)
    assert found.message.startswith("the scale is 1, 4 times 1/√16: no factor at all")
    assert found.places == ("blocks.0.attn", "blocks.1.attn")
    (found,), _ = judge("NP404", scaled(1 / 16, 1 / 16, trained=trained))
    assert (found.severity.value, found.value) == ("note", 0.25)
    assert "1/16, which muP has, and the usual factor squared" in found.message


def layers(*built: tuple[float, int, int]) -> ReportData:
    """Sites of different scale, heads and head width on one stream."""
    sites = tuple(
        b.site(f"b.{i}.attn", scale=scale, heads=heads, head_dim=width, columns={"q": HeadRows(parameter=f"b.{i}.q")})
        for i, (scale, heads, width) in enumerate(built)
    )
    data = attended(*(b.logits(1.0, path=site.path) for site in sites), sites=sites)
    weights = tuple(b.weight_site(f"b.{i}.q") for i in range(len(built)))
    return data.model_copy(update={"anatomy": data.anatomy.model_copy(update={"weights": weights})})


@pytest.mark.parametrize(
    "law",
    [lambda h, d: 1.0, lambda h, d: d**-0.5, lambda h, d: 1 / d, lambda h, d: 2 / d, lambda h, d: (h * d) ** -0.5],
)
def test_np404_knows_layers_of_several_sizes_under_one_law(law: Any) -> None:
    found, _ = judge("NP404", layers(*((law(h, d), h, d) for h, d in ((4, 16), (4, 16), (8, 512)))))
    assert not any("that of the other sites" in f.message for f in found)


def test_np404_only_notes_the_scale_of_a_layer_that_is_built_otherwise() -> None:
    found, _ = judge("NP404", layers((0.25, 4, 16), (0.25, 4, 16), (0.1, 8, 32)))
    assert [(f.where, f.severity.value) for f in found] == [("b.2.attn", "note")]
    assert "sites like it, with other heads or another window, is 1 times" in found[0].message
    found, _ = judge("NP404", layers((0.25, 4, 16), (0.25, 4, 16), (0.1, 4, 16), (0.1768, 8, 32)))
    assert [(f.where, f.severity.value) for f in found] == [("b.2.attn", "warning")]


def test_np404_warns_of_new_weights_whose_logits_are_far_too_large() -> None:
    (found,), _ = judge("NP404", scaled(1.0, 1.0, std=16.0))
    assert (found.severity.value, found.value, found.limit) == ("warning", 16.0, 5.0)
    (found,), _ = judge("NP404", scaled(1.0, 1.0, std=5.0))
    assert found.severity.value == "note"


@pytest.mark.parametrize(
    ("scale", "std", "limit"),
    [
        (1.0, 5.1, 5.0),  # without its factor; 1.3 with it
        (1.0, 19.9, 5.0),
        (1.0, 20.1, None),  # above 5 at 1/√16 as well
        (1.0, 4.9, None),  # as T5 and GPT-Neo are trained
        (1 / 16, 0.49, 0.5),
        (1 / 16, 0.13, 0.5),
        (1 / 16, 0.12, None),
        (1 / 16, 0.51, None),
    ],
)
def test_np404_warns_of_weights_that_were_trained_for_the_usual_scale(
    scale: float, std: float, limit: float | None
) -> None:
    (unknown,), _ = judge("NP404", scaled(scale, scale, std=std, trained=None))
    assert unknown.severity.value == "note"
    (found,), _ = judge("NP404", scaled(scale, scale, std=std, trained=True))
    if limit is None:
        assert found.severity.value == "note"
        return
    assert (found.severity.value, found.value, found.limit) == ("warning", std, limit)
    assert found.places == ("blocks.0.attn", "blocks.1.attn")


def test_np404_asks_the_median_head() -> None:
    """A head or two with large logits are no sign that the factor was lost."""
    sites = (b.site("a", scale=1.0, head_dim=16),)
    for stds, severity in (((2.0, 2.0, 19.0), "note"), ((2.0, 9.0, 19.0), "warning")):
        heads = tuple(b.logits(1.0, path="a", std=std).heads[0] for std in stds)
        measure = b.logits(1.0, path="a").model_copy(update={"heads": heads})
        (found,), _ = judge("NP404", attended(measure, sites=sites, trained=True))
        assert found.severity.value == severity


def test_np404_warns_of_the_width_of_all_heads() -> None:
    (found,), _ = judge("NP404", scaled(1 / 16, 1 / 16, heads=16))
    assert found.severity.value == "note"  # 1/√(16·16) is muP's 1/16
    (found,), _ = judge("NP404", scaled(1 / 16, 1 / 16, heads=8, head_dim=32))
    assert found.severity.value == "warning"
    assert "that of 8 heads together, 256 features, not of one" in found.message
    (found,), _ = judge("NP404", scaled(1 / 16, 1 / 16, heads=8, head_dim=32, trained=True))
    assert found.severity.value == "note"


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("std", [0.1, 1.0])  # 1: as if weights were drawn for that scale
def test_np404_warns_of_the_width_of_few_heads(heads: int, std: float) -> None:
    (found,), _ = judge("NP404", scaled(*[1 / math.sqrt(16 * heads)] * 2, heads=heads, std=std))
    assert (found.severity.value, found.limit) == ("warning", None)
    assert f"that of {heads} heads together" in found.message


def test_np404_takes_the_scale_that_a_configuration_states_for_meant() -> None:
    stated = Declared(path=".", field="query_pre_attn_scalar", fact="attention_scale", stated=64, value=0.125)
    data = scaled(0.125, 0.125).model_copy(update={"declared": (stated,)})
    assert judge("NP404", data) == ((), ())
    far = stated.model_copy(update={"stated": 256, "value": 0.0625})
    (found,), _ = judge("NP404", scaled(0.0625, 0.0625).model_copy(update={"declared": (far,)}))
    assert found.severity.value == "note"
    assert "as query_pre_attn_scalar = 256 states" in found.message
    other = data.model_copy(update={"declared": (stated.model_copy(update={"value": 0.25}),)})
    (found,), _ = judge("NP404", other)
    assert found.severity.value == "warning"


def test_np404_is_one_note_where_the_scale_falls_with_depth() -> None:
    (found,), _ = judge("NP404", scaled(*[0.25 / (i + 1) for i in range(8)]))
    assert (found.severity.value, len(found.places)) == ("note", 6)
    assert found.message.startswith("the scales are 0.03125 to 0.08333, 0.125 to 0.3333 times 1/√16: 1/√d divided by")
    assert isinstance(found.value, float)
    assert found.value == pytest.approx(1 / 8)


def on_streams(*scales: float, streams: tuple[int, ...], names: tuple[str, ...] = ()) -> ReportData:
    """Sites whose queries come from a weight of that stream each, called after `names`."""
    data = scaled(*scales, std=1.0)
    paths = [f"{name}.attn" for name in names] or [site.path for site in data.anatomy.attention]
    held = [
        site.model_copy(update={"path": path, "columns": {"q": HeadRows(parameter=f"{path}.q")}})
        for site, path in zip(data.anatomy.attention, paths, strict=True)
    ]
    weights = tuple(b.weight_site(f"{path}.q", stream=stream) for path, stream in zip(paths, streams, strict=True))
    anatomy = data.anatomy.model_copy(update={"attention": tuple(held), "weights": weights})
    return data.model_copy(update={"anatomy": anatomy})


def test_np404_compares_along_a_stream_whatever_its_modules_are_called() -> None:
    (found,), _ = judge("NP404", on_streams(0.25, 0.25, 0.4, 0.25, streams=(0,) * 4, names=("a", "mid", "up", "last")))
    assert (found.severity.value, found.where) == ("warning", "up.attn")
    assert isinstance(found.value, float)
    assert found.value == pytest.approx(1.6)
    assert judge("NP404", on_streams(0.25, 0.25, 0.4, streams=(0, 0, 1))) == ((), ())


@pytest.mark.parametrize(
    "data",
    [
        scaled(0.25, 0.25, 0.25),
        scaled(0.49, 0.49),  # within a factor of two
        scaled(0.14, 0.14),
        scaled(0.25, 0.25, heads=1),
        scaled(0.144, 0.144, heads=3, biased=True),  # DeBERTa's 1/√(3d), for a sum of three products
        scaled(1.0, 1.0, std=1.1),  # drawn to fit, as T5 does
        scaled(None, None, scale_parameter="logit_scale"),
        scaled(0.25, 0.13, 0.3, 0.2),  # no scale is common
        scaled(0.25, 0.25, 0.3, 0.2, 0.4),  # two of five have one
    ],
)
def test_np404_passes(data: ReportData) -> None:
    assert judge("NP404", data) == ((), ())


def test_np404_says_that_a_scale_is_not_constant() -> None:
    found, (skipped,) = judge("NP404", scaled(None))
    assert (found, skipped.why) == ((), "the factor on q·k is not constant")


def test_np405_gives_its_reason() -> None:
    (found,), _ = judge("NP405", attended(b.logits(3.0, 30.0), b.logits(3.0, path="b.attn")))
    assert (found.value, found.limit, found.severity.value) == (30.0, 25.0, "note")
    assert found.message == (
        "logits reach 30 in head 1 and nothing bounds them, queries have RMS 1, keys 1; with QK-Norm at gains of 1 "
        "they reach 2; 1 of 2 attention sites is so"
    )


@pytest.mark.parametrize(
    ("logit", "facts"),
    [(25.0, {}), (90.0, {"softcap": 100.0}), (90.0, {"qk_norm": QKNorm(kind="rmsnorm", axis="head")}), (NAN, {})],
)
def test_np405_passes_what_is_bounded(logit: float, facts: dict[str, Any]) -> None:
    assert judge("NP405", attended(b.logits(logit), sites=(b.site(**facts),))) == ((), ())


def test_np405_cannot_tell_a_bias_from_a_product() -> None:
    sites = (b.site(biased=True),)
    found, (skipped,) = judge("NP405", attended(b.logits(90.0, uncapped_max=None), sites=sites))
    assert (found, skipped.why) == ((), "the logits are large and carry a position bias, q·k alone was not measured")
    assert judge("NP405", attended(b.logits(90.0, uncapped_max=25.0), sites=sites)) == ((), ())
    (found,), _ = judge("NP405", attended(b.logits(12.0, uncapped_max=26.0), sites=sites))
    assert (found.value, found.message[:44]) == (26.0, "logits without their position bias reach 26 ")


@pytest.mark.parametrize("logit", [math.inf, NAN])
def test_np405_advises_nothing_for_logits_that_are_not_finite(logit: float) -> None:
    assert judge("NP405", attended(b.logits(logit, 3.0))) == ((), ())
