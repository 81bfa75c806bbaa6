"""NP301, NP302, NP305, NP306, NP307, NP308 and the channels of NP303, on documents."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import BranchScale, Finding, OutlierChannel, ReportData, Skipped, StreamState
from normprobe.records.init import Initialisation
from tests.checks import builders as b

NAN, INF = math.nan, math.inf


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, [find(code)])


def measured(*states: StreamState, trained: bool | None = None, stream: Any = None, **more: Any) -> ReportData:
    """A document with this stream; `trained` is what its weights tell."""
    init = None if trained is None else Initialisation(trained=trained, evidence=(), writes=(), roles=(), weights=())
    return b.document(streams=(stream or b.stream(),), residual=(b.residual(*states, **more),), init=init)


def growing(rates: list[float], **more: Any) -> ReportData:
    """A stream of one write a block that grows by these factors."""
    sizes = [math.prod(rates[: i + 1]) for i in range(len(rates))]
    return measured(*(b.state(i, rms=size) for i, size in enumerate(sizes)), independent_rms=1e9, **more)


def test_np301_finds_aligned_writes() -> None:
    (found,), _ = judge("NP301", measured(b.state(0), b.state(1, rms=3.0), independent_rms=1.2))
    assert (found.where, found.value, found.limit, found.severity.value) == ("blocks", 2.5, 2.0, "warning")
    assert "2.5 times what writes of these sizes give if they are independent (1.2)" in found.message
    assert judge("NP301", measured(b.state(0), b.state(1, rms=2.4), independent_rms=1.2)) == ((), ())


def test_np301_finds_growth_by_a_factor_in_every_block() -> None:
    (found,), _ = judge("NP301", growing([1.5] * 12))
    assert isinstance(found.value, float)
    assert found.value == pytest.approx(1.5**6 / math.sqrt(2))
    assert "by 1.5 a block" in found.message


@pytest.mark.parametrize(
    "rates",
    [
        [math.sqrt((i + 2) / (i + 1)) for i in range(48)],  # √L
        [1.0] * 8 + [1.0, 30.0, 1.0, 1.0],  # one large write
        [1.5] * 7,  # too few to tell
        [1.5] * 6 + [0.9] * 6,
        [1.0] * 12,
    ],
)
def test_np301_passes_what_is_no_such_law(rates: list[float]) -> None:
    assert judge("NP301", growing(rates)) == ((), ())


def test_np301_is_a_note_for_a_trained_model() -> None:
    (found,), _ = judge("NP301", growing([1.5] * 12, trained=True))
    assert found.severity.value == "note"


@pytest.mark.parametrize(
    "stream",
    [
        b.stream(placement="post", branches=(b.branch("blocks.0", placement="post"), b.branch("blocks.1"))),
        b.stream(topology="long_skips"),
        b.stream(widths=(8, 16)),
        b.stream(branches=(b.branch("blocks.0", skip_scale=0.5), b.branch("blocks.1"))),
        b.stream(branches=(b.branch("blocks.0", skip="projection"), b.branch("blocks.1"))),
    ],
)
def test_np301_judges_plain_sums_alone(stream: Any) -> None:
    assert judge("NP301", measured(b.state(0), b.state(1, rms=9.0), stream=stream)) == ((), ())


def test_np301_says_that_a_write_is_missing() -> None:
    found, (skipped,) = judge("NP301", measured(b.state(0), independent_rms=NAN))
    assert (found, skipped.why) == ((), "a write was not measured")


def writes(*shares: float, **more: Any) -> ReportData:
    return measured(*(b.state(i, write_share=share) for i, share in enumerate(shares)), **more)


def test_np302_finds_layers_that_idle() -> None:
    (found,), _ = judge("NP302", writes(*[0.3] * 8, 0.01, 0.005, 0.019, 0.01, trained=True))
    assert (found.where, found.value, found.limit) == ("blocks.9", 0.005, 0.02)
    assert found.places == ("blocks.8", "blocks.9", "blocks.10", "blocks.11")
    assert found.message.startswith("4 of 12 writes are less than 0.02 of the stream")


@pytest.mark.parametrize(
    ("shares", "trained"),
    [
        ([0.3] * 8 + [0.01] * 3, True),  # fewer than four
        ([0.3] * 13 + [0.01] * 4, True),  # fewer than a quarter
        ([0.02] * 8, True),
        ([0.001] * 8, False),  # a depth-scaled init of a narrow model
        ([0.001] * 8, None),
    ],
)
def test_np302_passes_few_small_writes(shares: list[float], trained: bool | None) -> None:
    assert judge("NP302", writes(*shares, trained=trained)) == ((), ())


def test_np302_leaves_learned_scales_that_start_small_and_zeros() -> None:
    scaled = b.stream(branches=tuple(b.branch(f"blocks.{i}", branch_scale=scale()) for i in range(4)))
    assert judge("NP302", writes(*[1e-5] * 4, stream=scaled, trained=False)) == ((), ())
    (found,), _ = judge("NP302", writes(*[1e-5] * 4, stream=scaled, trained=True))
    assert found.value == 1e-5
    zeros = measured(*(b.state(i, write_share=0.0, write_rms=0.0) for i in range(6)))
    assert judge("NP302", zeros) == ((), ())


def scale() -> BranchScale:
    return BranchScale(kind="channel", parameter="gamma")


def channel(ratio: float, index: int = 7) -> OutlierChannel:
    return OutlierChannel(channel=index, size=8.0, ratio=ratio, first=0, last=1)


def test_np303_names_a_channel_that_is_large_everywhere() -> None:
    (found,), _ = judge("NP303", measured(outliers=(channel(30.0), channel(254.0, 3), channel(20.0, 4))))
    assert (found.where, found.value, found.limit, found.severity.value) == ("blocks.0", 254.0, 20.0, "note")
    assert found.message == (
        "channel 3 holds 8 in the median token, 254 times the median channel, up to blocks.1: an 8-bit integer grid of "
        "such a token has 0.5 of a step for the median channel; 2 channels so"
    )
    assert judge("NP303", measured(outliers=(channel(20.0),))) == ((), ())


def dead(*sizes: float, **more: Any) -> ReportData:
    return measured(*(b.state(i, write_rms=size, write_max=size) for i, size in enumerate(sizes)), **more)


def test_np305_finds_a_branch_that_adds_nothing() -> None:
    (found,), _ = judge("NP305", dead(1.0, 0.0, 2.0, 3.0))
    assert (found.where, found.value, found.severity.value) == ("blocks.1", 0.0, "warning")
    assert found.message == (
        "this mlp branch adds nothing, 2 in the median of those that add something; 1 of 4 such branches"
    )
    (found,), _ = judge("NP305", dead(1.0, 0.0, 2.0, 1e-5))
    assert (found.where, found.places) == ("blocks.1", ("blocks.1", "blocks.3"))
    assert found.message.startswith("this mlp branch adds next to nothing: its largest token RMS is 1e-05")


def test_np305_passes_small_writes_and_a_start_at_zero() -> None:
    assert judge("NP305", dead(1.0, 1.1e-4, 1.0)) == ((), ())
    assert judge("NP305", dead(0.0, 0.0, trained=False)) == ((), ())
    (found,), _ = judge("NP305", dead(0.0, 0.0, trained=True))
    assert found.places == ("blocks.0", "blocks.1")


def test_np305_compares_branches_of_one_kind() -> None:
    states = (b.state(0, kind="attention", write_max=0.0, write_rms=0.0), b.state(1), b.state(2))
    assert judge("NP305", measured(*states)) == ((), ())
    (found,), _ = judge("NP305", measured(*states, b.state(3, kind="attention")))
    assert found.where == "blocks.0"


def test_np305_counts_every_token() -> None:
    """Most tokens skip the branch, one does not."""
    assert judge("NP305", measured(b.state(0), b.state(1, write_rms=0.0, write_max=0.6))) == ((), ())


@pytest.mark.parametrize("code", ["NP305", "NP307"])
def test_a_write_that_was_not_seen_is_skipped(code: str) -> None:
    lost = b.state(1, write_rms=NAN, write_max=NAN, bf16_loss=NAN)
    found, (skipped,) = judge(code, measured(b.state(0), lost))
    assert found == ()
    assert skipped.what.endswith("at blocks.1")
    assert skipped.why == "what it adds is no operand of its own at the add"


def loud(ratio: float, over: float, **more: Any) -> ReportData:
    return measured(b.state(0), b.state(1), b.state(2, write_rms=0.5 * over, write_ratio=ratio), **more)


def test_np306_finds_a_branch_that_overwrites_the_stream() -> None:
    (found,), _ = judge("NP306", loud(6.0, 30.0))
    assert (found.where, found.value, found.limit, found.severity.value) == ("blocks.2", 30.0, 10.0, "warning")
    assert found.message == (
        "this mlp branch writes 6 times the RMS of the trunk it is added to, and 30 times the median write of its kind"
    )
    (found,), _ = judge("NP306", loud(6.0, 30.0, trained=True))
    assert found.severity.value == "note"


@pytest.mark.parametrize(("ratio", "over"), [(50.0, 1.0), (50.0, 10.0), (1.0, 30.0), (0.5, 30.0)])
def test_np306_passes_a_first_write_and_one_that_is_small_beside_the_trunk(ratio: float, over: float) -> None:
    assert judge("NP306", loud(ratio, over)) == ((), ())


@pytest.mark.parametrize("ratio", [1.2, 1.6, 2.0])
def test_np306_passes_a_stream_that_grows_by_a_factor_a_block(ratio: float) -> None:
    """Late writes are far larger than early ones, and all are alike beside their trunk."""
    sizes = (ratio**i for i in range(12))
    states = [b.state(i, write_rms=size, write_ratio=ratio) for i, size in enumerate(sizes)]
    assert judge("NP306", measured(*states)) == ((), ())
    states[9] = b.state(9, write_rms=30 * ratio**9, write_ratio=30 * ratio)
    (found,), _ = judge("NP306", measured(*states))
    assert found.where == "blocks.9"


def test_np306_tells_one_of_two() -> None:
    states = (b.state(0), b.state(1, write_rms=15.0, write_ratio=6.0))
    (found,), _ = judge("NP306", measured(*states))
    assert found.where == "blocks.1"


@pytest.mark.parametrize(("small", "told"), [(1, ["blocks.0"]), (2, []), (3, ["blocks.0"])])
def test_np306_does_not_take_the_sound_half_for_the_faulty_one(small: int, told: list[str]) -> None:
    """The first write on small embeddings is far larger than its trunk, as it should be; where others were lost, it is
    the exception only if it is alone, or most are like the small ones."""
    sizes = [1.0, *(0.01 if i < small else 1.0 for i in range(3))]
    rows = [b.state(i, write_rms=size, write_ratio=0.4 * size) for i, size in enumerate(sizes)]
    rows[0] = b.state(0, write_rms=30.0 if small == 1 else 1.0, write_ratio=50.0)
    assert [f.where for f in judge("NP306", measured(*rows))[0]] == told


@pytest.mark.parametrize(
    ("dtype", "losses", "severity"),
    [
        ("bfloat16", {"bf16_loss": 0.51}, "warning"),
        ("float16", {"fp16_loss": 0.51}, "warning"),
        ("float32", {"bf16_loss": 1.01}, "note"),
        ("bfloat16", {"bf16_loss": 0.5}, None),
        ("float16", {"bf16_loss": 9.0}, None),
        ("float32", {"bf16_loss": 1.0}, None),
        ("float32", {"fp16_loss": INF}, None),  # NP304's
    ],
)
def test_np307_judges_the_format_of_the_sum(dtype: str, losses: dict[str, float], severity: str | None) -> None:
    found, skipped = judge("NP307", measured(b.state(0), b.state(1, **losses), dtype=dtype))
    assert skipped == ()
    assert [f.severity.value for f in found] == ([severity] if severity else [])


def test_np307_says_what_is_lost_and_where_most() -> None:
    states = (b.state(0, bf16_loss=0.6), b.state(1, bf16_loss=0.9, write_share=0.003))
    (found,), _ = judge("NP307", measured(*states, dtype="bfloat16"))
    assert (found.where, found.value, found.places) == ("blocks.1", 0.9, ("blocks.0", "blocks.1"))
    assert found.message == (
        "rounding the sum to bfloat16 changes it by 0.9 times the RMS of this mlp write, which is 0.003 of the stream; "
        "so at 2 of 2 writes"
    )


def tokens(first: float, last: float, kind: str = "attention", **more: Any) -> ReportData:
    return measured(b.state(0, kind=kind), b.state(1, token_cosine=last), entry_cosine=first, **more)


def test_np308_finds_tokens_that_become_one() -> None:
    (found,), _ = judge("NP308", tokens(0.1, 0.995))
    assert (found.where, found.limit, found.severity.value) == ("blocks.1", 0.01, "warning")
    assert found.value == pytest.approx(0.005)
    assert "rises from 0.1 before the first write to 0.995 after the last of 2" in found.message
    (found,), _ = judge("NP308", tokens(0.1, 0.995, trained=True))
    assert found.severity.value == "note"


@pytest.mark.parametrize(
    ("first", "last", "kind"),
    [
        (0.1, 0.98, "attention"),
        (0.96, 0.995, "attention"),
        (0.1, 0.995, "conv"),
        (1.0, 1.0, "attention"),
        (1.0, 1.0001, "attention"),
    ],
)
def test_np308_passes_tokens_that_were_alike_and_maps(first: float, last: float, kind: str) -> None:
    assert judge("NP308", tokens(first, last, kind)) == ((), ())


def test_np308_needs_two_tokens() -> None:
    found, (skipped,) = judge("NP308", tokens(NAN, NAN))
    assert (found, skipped.why) == ((), "the samples have one token")
    _, (skipped,) = judge("NP308", tokens(NAN, 0.5))
    assert skipped.why == "the trunk before the first write was not seen"


@pytest.mark.parametrize("code", ["NP301", "NP302", "NP305", "NP306", "NP307", "NP308"])
def test_a_stream_without_writes_is_skipped(code: str) -> None:
    empty = b.residual().model_copy(update={"states": ()})
    found, (skipped,) = judge(code, b.document(residual=(empty,)))
    assert (found, skipped.why) == ((), "no write to the stream was measured")
