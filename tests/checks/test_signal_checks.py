"""The checks that judge a stream, attention or the whole forward: NP201, NP303, NP304, NP401, NP504."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import Finding, Head, Measurements, RawEnd, ReportData, Skipped
from normprobe.records.measurements import NonFinite
from tests.checks import builders as b

NAN, INF = math.nan, math.inf


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, [find(code)])


@pytest.mark.parametrize("placement", ["pre", "sandwich", "output", "mixed", "preact", "none"])
def test_np201_finds_a_stream_that_needs_a_norm_and_states_what_the_head_reads(placement: str) -> None:
    measured = b.residual(b.state(0, rms=2.0), b.state(1, rms=7.4))
    missing = b.stream(final_norm=None, placement=placement)
    (found,), _ = judge("NP201", b.document(streams=(missing,), residual=(measured,)))
    assert (found.where, found.value, found.severity.value) == ("blocks", 7.4, "error")
    assert found.message == (
        "the head reads the raw stream, without a norm, after 2 writes: "
        "its RMS is 7.4 (median token) to 8.88 (largest), against 0.5 at the entry"
    )


@pytest.mark.parametrize("head", [None, Head(path="head.weight")])
def test_np201_says_what_reads_the_stream(head: Head | None) -> None:
    raw = b.stream(final_norm=None, raw_end=RawEnd(reader="last_hidden_state"))
    data = b.document(streams=(raw,), residual=())
    data = data.model_copy(update={"anatomy": data.anatomy.model_copy(update={"head": head})})
    (found,), _ = judge("NP201", data)
    assert found.message == "the raw stream is read without a norm by last_hidden_state, after 2 writes"


def test_np201_leaves_a_stream_that_is_returned_to_its_reader() -> None:
    raw = b.stream(final_norm=None, raw_end=RawEnd(reader="last_hidden_state", returned=True))
    (found,), _ = judge("NP201", b.document(streams=(raw,), residual=()))
    assert found.severity.value == "note"
    assert found.message == (
        "the stream is returned raw as last_hidden_state, after 2 writes; "
        "what reads it there is not seen and has to norm it"
    )


def test_np201_warns_of_a_pool_that_is_read_unless_a_norm_lies_idle() -> None:
    raw = b.stream(final_norm=None, raw_end=RawEnd(reader="head", pooled=True))
    (found,), _ = judge("NP201", b.document(streams=(raw,), residual=()))
    assert found.severity.value == "warning"
    assert found.message == (
        "a mean or sum over the tokens of the raw stream is read without a norm by head, after 2 writes"
    )
    idle = (b.norm("norm", role="unused", executions=0, executed=False, size=8),)
    raw = raw.model_copy(update={"widths": (8,)})
    (found,), _ = judge("NP201", b.document(streams=(raw,), norms=idle, residual=()))
    assert found.severity.value == "error"


def test_np201_warns_of_a_single_block() -> None:
    blocks = tuple(b.branch(path, block="decoder") for path in ("decoder.attention", "decoder.mlp"))
    raw = b.stream(final_norm=None, raw_end=RawEnd(reader="head"), branches=blocks)
    assert judge("NP201", b.document(streams=(raw,), residual=()))[0][0].severity.value == "warning"


def test_np201_names_no_head_where_none_was_found() -> None:
    data = b.document(streams=(b.stream(final_norm=None),), residual=())
    data = data.model_copy(update={"anatomy": data.anatomy.model_copy(update={"head": None})})
    (found,), _ = judge("NP201", data)
    assert found.message == "no norm follows the stream after 2 writes (no head was found)"


def test_np201_needs_no_measurement() -> None:
    data = b.document(streams=(b.stream(final_norm=None),), residual=(), level="structure")
    (found,), _ = judge("NP201", data)
    assert found.value is None


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"final_norm": None, "needs_final_norm": False},
        {"final_norm": None, "needs_final_norm": True, "placement": "post"},
        {"final_norm": None, "needs_final_norm": None, "placement": "deepnorm"},
        {"final_norm": "norm", "needs_final_norm": None},
    ],
)
def test_np201_passes_what_has_one_or_needs_none(facts: dict[str, Any]) -> None:
    assert judge("NP201", b.document(streams=(b.stream(**facts),))) == ((), ())


def test_np201_says_why_it_could_not_decide() -> None:
    undecided = b.stream(final_norm=None, needs_final_norm=None, final_norm_reason="features of layer -2")
    found, skipped = judge("NP201", b.document(streams=(undecided,)))
    assert found == ()
    what = "NP201 missing-final-norm at blocks"
    assert skipped == (Skipped(what=what, why="features of layer -2", places=("blocks",)),)


def test_np303_names_channel_position_value_and_extent() -> None:
    (found,), _ = judge("NP303", b.document(residual=(b.residual(massive=(b.massive(900.0),)),)))
    assert (found.where, found.value, found.limit, found.unit) == ("blocks.0", 900.0, 100.0, "ratio")
    assert "channel 5 at position 0 holds -800, 900 times the median" in found.message
    assert found.message.endswith("up to blocks.1")
    assert found.severity.value == "note"


def test_np303_gathers_the_entries_of_a_stream_and_states_the_largest() -> None:
    entries = (
        b.massive(300.0),
        b.massive(400.0, position=7),
        b.massive(200.0, channel=6),
        b.massive(9.0, 5, 2),
    )
    found, _ = judge("NP303", b.document(residual=(b.residual(massive=entries),)))
    assert [(f.value, f.message.split(" holds")[0]) for f in found] == [(400.0, "channel 5 at position 7")]
    assert found[0].message.endswith("; 3 entries stand out, in 2 channels at 2 positions")
    broken = (b.massive(300.0), b.massive(NAN, position=7))
    (lost,), _ = judge("NP303", b.document(residual=(b.residual(massive=broken),)))
    assert isinstance(lost.value, float)
    assert math.isnan(lost.value)


def test_np303_passes_up_to_its_limit_and_survives_a_broken_index() -> None:
    assert judge("NP303", b.document(residual=(b.residual(massive=(b.massive(100.0),)),))) == ((), ())
    lost = b.massive(900.0).model_copy(update={"first": 9})
    (found,), _ = judge("NP303", b.document(residual=(b.residual(massive=(lost,)),)))
    assert found.where == "blocks"


@pytest.mark.parametrize(
    ("dtype", "abs_max", "severity", "words"),
    [
        ("float16", 40000.0, "warning", "less than a factor of two is left"),
        ("float16", 65505.0, "error", "it has overflowed"),
        ("float16", INF, "error", "it has overflowed"),
        ("torch.bfloat16", 40000.0, "warning", "less than a factor of two would be left"),
        ("bfloat16", 1e5, "warning", "do not run it in float16, where it would overflow"),
        ("float32", 95991.0, "warning", "in float32: do not run it in float16"),
    ],
)
def test_np304_is_as_severe_as_its_consequence_today(dtype: str, abs_max: float, severity: str, words: str) -> None:
    data = b.document(residual=(b.residual(b.state(0), b.state(1, abs_max), dtype=dtype),))
    (found,), _ = judge("NP304", data)
    assert (found.where, found.severity.value, found.value) == ("blocks.1", severity, abs_max)
    assert words in found.message
    assert "channel 5" in found.message


@pytest.mark.parametrize("abs_max", [800.0, 12000.0, 32752.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_np304_passes_with_a_factor_of_two_left(abs_max: float, dtype: str) -> None:
    assert judge("NP304", b.document(residual=(b.residual(b.state(0, abs_max), dtype=dtype),))) == ((), ())


def test_np304_names_the_first_add_that_is_lost_and_lists_every_other() -> None:
    states = [b.state(0), b.state(1, 47996.0), b.state(2, 95991.0), b.state(3, INF, finite=False), b.state(4)]
    (found,), _ = judge("NP304", b.document(residual=(b.residual(*states, dtype="float16"),)))
    assert (found.where, found.places) == ("blocks.2", ("blocks.1", "blocks.2", "blocks.3"))


@pytest.mark.parametrize(("index", "words"), [(1, "the sum overflows"), (0, "it has overflowed")])
def test_np304_says_that_the_sum_overflows_where_it_was_given_finite_sides(index: int, words: str) -> None:
    data = b.document(residual=(b.residual(b.state(0), b.state(1, INF, finite=False), dtype="float16"),))
    first = NonFinite(direction="forward", operation="aten.add.Tensor", site=b.branch(f"blocks.{index}").add)
    told = data.measurements.model_copy(update={"first_non_finite_operation": first})
    (found,), _ = judge("NP304", data.model_copy(update={"measurements": told}))
    assert found.message.endswith(words)


def test_np304_leaves_nan_to_np504() -> None:
    data = b.document(residual=(b.residual(b.state(0), b.state(1, NAN, finite=False), dtype="float16"),))
    found, skipped = judge("NP304", data)
    assert found == ()
    what, why = "NP304 half-headroom at blocks.1", "the largest |x| is NaN (NP504)"
    assert skipped == (Skipped(what=what, why=why, places=("blocks.1",)),)
    assert [f.code for f in run(data)[0]] == ["NP504"]


def test_np304_names_the_overflow_and_not_the_nan_that_follows() -> None:
    states = (b.state(0, INF, finite=False), b.state(1, NAN, finite=False))
    (found,), skipped = judge("NP304", b.document(residual=(b.residual(*states, dtype="float16"),)))
    assert (found.where, found.places, found.value, found.severity.value) == ("blocks.0", (), INF, "error")
    assert skipped == ()


def test_np304_says_that_a_stream_has_no_states() -> None:
    empty = b.residual().model_copy(update={"states": ()})
    assert judge("NP304", b.document(residual=(empty,)))[1][0].what == "NP304 half-headroom at blocks"


def test_np401_names_the_worst_head_and_all_sites() -> None:
    sites = tuple(b.site(f"blocks.{i}.attn") for i in range(3))
    measured = (
        b.logits(10.0, 60.0, path="blocks.0.attn", bound=70.0),
        b.logits(50.0, 50.0, path="blocks.1.attn", bound=50.0),
        b.logits(71.0, 64.0, path="blocks.2.attn", bound=80.0, dtype="bfloat16"),
    )
    data = b.document(attention=sites).model_copy(update={"measurements": Measurements(attention=measured)})
    (found,), skipped = judge("NP401", data)
    assert skipped == ()
    assert (found.where, found.value, found.limit) == ("blocks.2.attn", 71.0, 50.0)
    assert found.places == ("blocks.0.attn", "blocks.2.attn")
    assert found.severity.value == "warning"
    assert found.message == (
        "logits reach 71 in head 0, where neighbouring bfloat16 numbers are 0.5 apart; "
        "2 of 3 attention sites exceed the limit"
    )


def measured(site: Any, *heads: Any) -> ReportData:
    return b.document(attention=(site,)).model_copy(update={"measurements": Measurements(attention=heads)})


def test_np401_notes_a_bound_that_alone_exceeds_the_limit() -> None:
    (found,), _ = judge("NP401", measured(b.site(), b.logits(20.0, 30.0, bound=90.0)))
    assert (found.severity.value, found.value) == ("note", 90.0)
    assert found.message == (
        "logits of up to 90 cannot be ruled out, though 64 sampled rows reach 30 at most; "
        "1 of 1 attention site has such a bound"
    )


@pytest.mark.parametrize(
    ("site", "heads"),
    [
        (b.site(), b.logits(20.0, bound=90.0, exact=True)),  # every row was looked at
        (b.site(softcap=50.0), b.logits(49.0, bound=900.0)),  # the cap bounds it
        (b.site(), b.logits(-900.0, bound=50.0)),
    ],
)
def test_np401_passes_what_is_bounded(site: Any, heads: Any) -> None:
    assert judge("NP401", measured(site, heads)) == ((), ())


def two(*caps: float | None) -> ReportData:
    """Two attention sites in one module, each with its cap."""
    return b.document(attention=tuple(b.site(softcap=cap) for cap in caps))


def with_logits(data: ReportData, *heads: Any) -> ReportData:
    return data.model_copy(update={"measurements": Measurements(attention=heads)})


@pytest.mark.parametrize(("caps", "bounds"), [((50.0, None), (40.0, 900.0)), ((None, 50.0), (900.0, 40.0))])
def test_np401_gives_two_sites_of_one_module_their_own_cap(
    caps: tuple[float | None, ...], bounds: tuple[float, ...]
) -> None:
    """The cap of one site bounds that site alone, whichever comes first."""
    (found,), _ = judge("NP401", with_logits(two(*caps), *(b.logits(3.0, bound=bound) for bound in bounds)))
    assert found.value == 900.0
    swapped = with_logits(two(*caps), *(b.logits(3.0, bound=bound) for bound in reversed(bounds)))
    assert judge("NP401", swapped) == ((), ())


def test_np401_misses_the_second_site_of_a_module() -> None:
    found, skipped = judge("NP401", with_logits(two(50.0, None), b.logits(3.0, bound=900.0)))
    assert [f.value for f in found] == [900.0]  # which of the two it is cannot be told, nor whether it is capped
    assert [row.why for row in skipped] == ["its logits were not measured"]
    found, _ = judge("NP401", with_logits(two(50.0, 50.0), b.logits(3.0, bound=900.0)))
    assert found == ()  # capped, whichever it is


def test_np401_is_not_silent_about_a_broken_bound_or_an_unmeasured_site() -> None:
    (found,), _ = judge("NP401", measured(b.site(softcap=50.0), b.logits(3.0, bound=INF)))
    assert found.severity.value == "note"
    found_too, skipped = judge("NP401", measured(b.site("other"), b.logits(3.0)))
    assert found_too == ()
    assert [row.what for row in skipped] == ["NP401 unresolved-logits at other"]


def test_np401_ranks_what_is_not_finite_above_every_number() -> None:
    (found,), _ = judge("NP401", measured(b.site(), b.logits(1e9, INF, 3.0)))
    assert found.value == INF


@pytest.mark.parametrize(
    ("rms", "dtype", "told"),
    [(1e20, "float32", True), (1.0, "float32", False), (None, "float32", False), (130.0, "float16", True)],
)
def test_np401_tells_an_overflow_of_known_queries_and_keys(rms: float | None, dtype: str, told: bool) -> None:
    (found,), _ = judge("NP401", measured(b.site(), b.logits(INF, 3.0, q_rms=rms, k_rms=rms, dtype=dtype)))
    assert (found.value, f"their product overflows {dtype})" in found.message) == (INF, told)


def test_np401_knows_large_queries_and_keys_that_do_not_meet() -> None:
    heads = b.logits(9.0, q_rms=1e20, k_rms=1e20, exact=True)
    assert judge("NP401", measured(b.site(), heads)) == ((), ())


@pytest.mark.parametrize(
    "heads",
    [b.logits(1e9, NAN, 3.0), b.logits(3.0, bound=NAN), b.logits(INF, q_rms=INF), b.logits(INF, k_rms=NAN)],
)
def test_np401_leaves_a_nan_to_np504(heads: Any) -> None:
    found, (skipped,) = judge("NP401", measured(b.site(), heads))
    assert found == ()
    assert (skipped.what, skipped.why) == (
        "NP401 unresolved-logits at blocks.0.attn",
        "a logit is NaN, or queries or keys are not finite (NP504)",
    )


def test_np401_judges_logits_with_a_position_bias_where_a_half_precision_holds_the_sum() -> None:
    (found,), skipped = judge(
        "NP401", measured(b.site(biased=True), b.logits(71.0, dtype="bfloat16", uncapped_max=1.0))
    )
    assert skipped == ()
    assert found.message.startswith("logits with their position bias reach 71 in head 0, where neighbouring bfloat16")
    cast = b.logits(71.0, uncapped_max=1.0).model_copy(update={"grid": "float16"})
    (found,), _ = judge("NP401", measured(b.site(biased=True), cast))
    assert "where neighbouring float16 numbers are 0.0625 apart" in found.message


def test_np401_judges_products_alone_where_float32_holds_the_sum_with_a_position_bias() -> None:
    site = b.site(biased=True)
    assert judge("NP401", measured(site, b.logits(71.0, bound=71.0, uncapped_max=50.0))) == ((), ())
    (found,), skipped = judge("NP401", measured(site, b.logits(20.0, uncapped_max=51.0)))
    assert (found.value, found.message[:44], skipped) == (51.0, "logits without their position bias reach 51 ", ())
    found_none, (skip,) = judge("NP401", measured(site, b.logits(71.0, uncapped_max=None)))
    assert (found_none, skip.why) == ((), "its logits carry a position bias, q·k alone was not measured")
    capped = b.site(biased=True, softcap=40.0)
    assert judge("NP401", measured(capped, b.logits(71.0, uncapped_max=90.0))) == ((), ())


def test_np401_judges_logits_as_they_are_where_nothing_is_added() -> None:
    (found,), _ = judge("NP401", measured(b.site(biased=False), b.logits(71.0)))
    assert found.message.startswith("logits reach 71 in head 0")


def test_np401_takes_no_cap_for_a_bound_where_a_bias_is_added_after_it() -> None:
    (found,), _ = judge(
        "NP401", measured(b.site(biased=True, softcap=50.0), b.logits(49.0, bound=900.0, dtype="bfloat16"))
    )
    assert (found.severity.value, found.value) == ("note", 900.0)


@pytest.mark.parametrize(
    ("parts", "where", "kinds"),
    [
        ({"output_finite": False}, ".", "outputs"),
        (
            {"output_finite": False, "first_non_finite": "blocks.1.fc#aten.mm:0"},
            "blocks.1.fc#aten.mm:0",
            "outputs",
        ),
        (
            {"output_finite": True, "residual": (b.residual(b.state(0), b.state(1, finite=False)),)},
            "blocks.1",
            "stream blocks",
        ),
        (
            {"output_finite": True, "residual": (b.residual(b.state(0, rms=NAN)),)},
            "blocks.0",
            "stream blocks",
        ),
        ({"output_finite": True, "gradients": b.gradients(value=INF)}, ".", "loss"),
    ],
)
def test_np504_finds_what_is_not_finite(parts: dict[str, Any], where: str, kinds: str) -> None:
    (found,), skipped = judge("NP504", b.document(level="backward", **parts))
    assert skipped == ()
    assert (found.where, found.severity.value) == (where, "error")
    assert found.message == f"not finite from here on: {kinds}"


def test_np504_tells_gradients_from_the_forward_that_is_finite() -> None:
    gradients = b.gradients(NAN).model_copy(update={"non_finite_parameters": ("head.weight",)})
    (found,), _ = judge("NP504", b.document(level="backward", output_finite=True, gradients=gradients))
    kinds = "gradients in stream blocks, gradients of parameters outside the streams"
    assert found.message == f"not finite, though all of the forward is: {kinds}"
    assert (found.where, found.places) == ("blocks.0", ("blocks.0", "blocks.1", "head.weight"))


def test_np504_passes_an_infinity_that_went_nowhere() -> None:
    """A mask filled with -inf is the first operation that is not finite, in a model that is."""
    data = b.document(output_finite=True, first_non_finite="attn#aten.masked_fill:0", gradients=b.gradients())
    assert judge("NP504", data) == ((), ())


def test_np504_says_that_the_outputs_were_not_looked_at() -> None:
    _, skipped = judge("NP504", b.document(output_finite=None, first_non_finite="a#op:0"))
    assert skipped[0].why == "the outputs were not looked at; a#op:0 gave a value that is not finite"
