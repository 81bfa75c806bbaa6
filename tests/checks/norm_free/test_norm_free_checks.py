"""NP801 to NP804 and NP116 on records: their limits, severities, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import BranchScale, Finding, ReportData, Severity
from tests.checks import builders as b

STANDARD = "weight_standardization"


def judged(code: str, data: ReportData) -> tuple[Finding, ...]:
    found, skipped = run(data, [find(code)])
    assert skipped == ()
    return found


def computed(code: str, held: Any, more: Any = None, **how: Any) -> tuple[Finding, ...]:
    return judged(
        code, b.document(reparametrizations=(b.normed_weight(**how),), computed_weights=(held,), **(more or {}))
    )


def severity(found: tuple[Finding, ...]) -> Severity | None:
    return found[0].severity if found else None


# ---- NP801, NP804


@pytest.mark.parametrize(("code", "kind"), [("NP801", "weight_norm"), ("NP801", "spectral_norm"), ("NP804", STANDARD)])
def test_an_empty_slice_is_an_error_where_nothing_guards_the_division(code: str, kind: str) -> None:
    (bare,) = computed(code, b.slices(empty=2), kind=kind)
    (guarded,) = computed(code, b.slices(empty=2), kind=kind, zeros=True, floor=1e-5)
    assert (bare.severity, guarded.severity) == (Severity.ERROR, Severity.WARNING)
    assert "0/0 = NaN" in bare.message
    assert "2 of 16" in bare.message
    assert "divided by 1e-05" in guarded.message
    assert computed(code, b.slices(), kind=kind, zeros=True, floor=1e-5) == ()


@pytest.mark.parametrize(("code", "kind"), [("NP801", "weight_norm"), ("NP804", STANDARD)])
def test_a_slice_that_is_not_finite_never_passes(code: str, kind: str) -> None:
    (found,) = computed(code, b.slices(non_finite=16, smallest=math.nan, median=math.nan), kind=kind)
    assert found.severity is Severity.ERROR
    assert "NaN or infinite in all 16" in found.message


@pytest.mark.parametrize(("code", "kind"), [("NP801", "weight_norm"), ("NP804", STANDARD)])
@pytest.mark.parametrize(("smallest", "small"), [(1e-3, False), (0.999e-3, True), (math.nan, True)])
def test_a_slice_below_the_eps_is_a_warning(code: str, kind: str, smallest: float, small: bool) -> None:
    found = computed(code, b.slices(smallest=smallest), kind=kind, floor=1e-3, zeros=True)
    assert severity(found) == (Severity.WARNING if small else None)
    assert computed(code, b.slices(smallest=smallest), kind=kind) == ()  # there is no eps


def test_each_speaks_of_its_own_kind() -> None:
    assert computed("NP804", b.slices(empty=1), kind="weight_norm") == ()
    assert computed("NP801", b.slices(empty=1), kind=STANDARD) == ()
    assert "whole weight" in computed("NP801", b.slices(empty=1, count=1), kind="spectral_norm")[0].message


WRITES = {"streams": (b.stream(branches=(b.branch("blocks.0", writers=("fc.g", "fc.v")), b.branch("blocks.1"))),)}


@pytest.mark.parametrize(
    ("zeros", "writes", "drawn", "expected"),
    [
        (1, False, 1.0, Severity.NOTE),
        (8, False, 1.0, Severity.NOTE),
        (9, False, 1.0, Severity.WARNING),
        (16, False, 1.0, Severity.WARNING),
        (16, True, 1.0, None),
        (16, True, None, None),
        (16, True, 0.1, Severity.NOTE),
        (9, True, 1.0, Severity.WARNING),
    ],
)
@pytest.mark.parametrize("kind", ["weight_norm", STANDARD])
def test_np801_gains_of_zero(
    zeros: int, writes: bool, drawn: float | None, expected: Severity | None, kind: str
) -> None:
    more = {"init": b.init(drawn), **(WRITES if writes else {})}
    assert severity(computed("NP801", b.slices(zero_gains=zeros), more, kind=kind)) == expected


@pytest.mark.parametrize(
    ("held", "how", "drawn", "expected"),
    [
        ({"empty": 16}, {}, 1.0, None),
        ({"empty": 16}, {}, 0.1, Severity.NOTE),
        ({"empty": 15}, {}, 1.0, Severity.WARNING),
        ({"empty": 16}, {"zeros": False, "floor": None}, 1.0, Severity.ERROR),
    ],
)
def test_np804_a_branch_may_start_closed(
    held: dict[str, Any], how: dict[str, Any], drawn: float, expected: Severity | None
) -> None:
    more = {"init": b.init(drawn), **WRITES}
    facts = {"kind": STANDARD, "zeros": True, "floor": 1e-3} | how
    assert severity(computed("NP804", b.slices(**held), more, **facts)) == expected
    if expected is None:  # it is another matter where all of the signal passes it
        assert severity(computed("NP804", b.slices(**held), {"init": b.init(drawn)}, **facts)) is Severity.WARNING


def test_np804_says_that_one_element_has_no_variance() -> None:
    (found,) = computed("NP804", b.slices(empty=16, elements=1), kind=STANDARD, zeros=True)
    assert "a filter of one element" in found.message


@pytest.mark.parametrize("code", ["NP801", "NP804"])
def test_weights_that_were_not_read_are_skipped(code: str) -> None:
    found, skipped = run(b.document(reparametrizations=(b.normed_weight(),)), [find(code)])
    assert found == ()
    assert [one.why for one in skipped] == ["the values behind the computed weights were not read"]


# ---- NP802


def dyt(**facts: Any) -> tuple[Finding, ...]:
    return judged("NP802", b.document(norms=(b.norm(kind="dyt"),), bounded_norms=(b.bounded(**facts),)))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, None),
        ({"saturated": 0.5, "output_rms": 0.95}, None),
        ({"saturated": 0.51, "output_rms": 0.95}, Severity.WARNING),
        ({"output_rms": 0.03}, None),
        ({"output_rms": 0.0299}, Severity.NOTE),
        ({"output_rms": 0.003}, Severity.NOTE),
        ({"output_rms": 0.0029}, Severity.WARNING),
        ({"output_rms": 0.0}, Severity.ERROR),
        ({"output_rms": 0.0, "input_rms": 0.0}, None),
    ],
)
def test_np802_at_its_limits(facts: dict[str, Any], expected: Severity | None) -> None:
    assert severity(dyt(**facts)) == expected


def test_np802_gathers_all_norms_and_names_the_worst() -> None:
    shares, sizes = (0.6, 0.9, 0.0, 0.0, 0.0), (0.9, 0.95, 0.02, 0.01, 0.001)
    rows = [b.bounded(f"{i}", saturated=a, output_rms=r) for i, (a, r) in enumerate(zip(shares, sizes, strict=True))]
    found = judged("NP802", b.document(norms=(b.norm(kind="dyt"),), bounded_norms=(*rows, b.bounded())))
    told = [(one.severity, one.where, one.every_place) for one in found]
    assert told == [
        (Severity.WARNING, "1", ("0", "1")),
        (Severity.WARNING, "4", ("4",)),
        (Severity.NOTE, "3", ("2", "3")),
    ]
    assert "2 of 6 such norms" in found[0].message


def test_np802_skips_what_was_not_measured() -> None:
    for rows, why in (((), "what it is given was not measured"), ((math.nan,), "what it gives is not finite")):
        bounded = tuple(b.bounded(output_rms=value) for value in rows)
        found, skipped = run(b.document(norms=(b.norm(kind="dyt"),), bounded_norms=bounded), [find("NP802")])
        assert found == ()
        assert [(one.what, one.why) for one in skipped] == [("NP802 dyt-alpha at blocks.0.norm", why)]


# ---- NP803


def held(
    *stds: float | None, drawn: float | None = 1.0, skips: dict[int, str] | None = None, entry: float = 1.0, **more: Any
) -> ReportData:
    stream = b.unnormed(len(stds), **more)
    branches = [
        branch.model_copy(update={"skip": (skips or {}).get(i, "identity")}) for i, branch in enumerate(stream.branches)
    ]
    stream = stream.model_copy(update={"branches": tuple(branches)})
    measured = b.residual(*b.given(*stds)).model_copy(update={"entry_rms": entry})
    return b.document(streams=(stream,), residual=(measured,), init=b.init(drawn))


@pytest.mark.parametrize(
    ("stds", "off"),
    [
        ((1.0, 0.98, 0.96), []),
        ((0.57, 0.56, 0.55), []),
        ((1.0, 2.5, 1.0), []),
        ((1.0, 2.6, 1.0), [("blocks.1", "most")]),
        ((1.0, 0.4, 1.0), []),
        ((1.0, 0.39, 1.0), [("blocks.1", "least")]),
        ((0.4, 0.4, 0.4), []),
        ((0.39, 0.39, 0.39), [("blocks.0", "least")]),
        ((3.0, 3.0, 3.0), [("blocks.0", "most")]),
        ((1.0, 3.0, 9.0, 1.0), [("blocks.1", "most")]),
        ((1.0, 10.0, 0.1), [("blocks.1", "most"), ("blocks.2", "least")]),
        ((1.0, math.nan, 1.0), [("blocks.1", "most")]),
        ((0.0, 0.0, 0.0), [("blocks.0", "least")]),
    ],
)
def test_np803_compares_the_branches_of_a_stage(stds: tuple[float, ...], off: list[tuple[str, str]]) -> None:
    limits = {getattr(find("NP803"), name): name for name in ("most", "least", "between")}
    found = judged("NP803", held(*stds))
    assert [(one.where, limits[one.limit or 0]) for one in found] == off


def test_np803_compares_the_first_branch_with_what_enters_the_stream() -> None:
    """Inputs of another size than in training are not the constants' fault; constants that lower them are."""
    stds = (0.2, 0.2, 0.2)
    assert judged("NP803", held(*stds, entry=0.3)) == ()
    (one,) = judged("NP803", held(*stds, entry=0.6))
    assert (one.value, one.every_place) == (pytest.approx(0.2 / 0.6), ("blocks.0", "blocks.1", "blocks.2"))
    assert judged("NP803", held(*stds, entry=50.0))[0].value == 0.2
    beside = held(0.5, 0.1, 0.1, entry=0.3, skips={0: "projection"})  # what enters is not what is read there
    assert judged("NP803", beside) == judged("NP803", held(0.5, 0.1, 0.1, entry=9.0, skips={0: "projection"}))


def test_np803_lets_a_pooling_between_stages_lower_all_that_follows() -> None:
    stds = (1.0, 1.0, 0.5, 0.49, 0.5, 0.12)
    assert judged("NP803", held(*stds, skips={1: "projection", 4: "pooling"})) == ()
    (found,) = judged("NP803", held(*stds))
    assert found.where == "blocks.5"
    (found,) = judged("NP803", held(1.0, 1.0, 0.04, 0.04, skips={1: "projection"}))
    assert (found.where, found.every_place) == ("blocks.2", ("blocks.2", "blocks.3"))
    (found,) = judged("NP803", held(1.0, 1.0, 0.04, 0.04, 0.9, 0.9, skips={1: "projection", 4: "projection"}))
    assert found.every_place == ("blocks.2", "blocks.3")  # what follows is judged by what was sound
    (found,) = judged("NP803", held(1.0, 9.0, 0.5, 0.5, skips={1: "projection"}))
    assert (found.where, found.value) == ("blocks.1", 9.0)


def test_np803_is_silent_where_no_constants_hold_the_stream_and_in_a_trained_model() -> None:
    assert judged("NP803", held(1.0, 9.0, drawn=0.1)) == ()
    assert judged("NP803", held(1.0, 9.0, scale=1.0)) == ()
    assert judged("NP803", held(1.0, 9.0, branch_scale=BranchScale())) == ()  # it may be the gain of an activation
    assert judged("NP803", held(1.0, 9.0, pre_norm="n")) == ()
    assert len(judged("NP803", held(1.0, 9.0, drawn=None))) == 1


def test_np803_a_factor_on_the_branch_and_standardised_weights_are_enough() -> None:
    data = held(1.0, 9.0, scale=1.0, readers=("fc.v",))
    how = (b.normed_weight(kind=STANDARD),)
    standard = data.model_copy(update={"anatomy": data.anatomy.model_copy(update={"reparametrizations": how})})
    assert len(run(standard, [find("NP803")])[0]) == 1
    plain = held(1.0, 9.0, scale=1.0, readers=("fc.v",), branch_scale=BranchScale())
    plain = plain.model_copy(update={"anatomy": plain.anatomy.model_copy(update={"reparametrizations": how})})
    assert run(plain, [find("NP803")])[0] == ()


def test_np803_skips_a_stream_that_was_not_measured() -> None:
    found, skipped = run(held(None, None), [find("NP803")])
    assert found == ()
    assert [one.why for one in skipped] == ["what its branches read was not measured"]


# ---- NP116


def unfused(seconds: float = 0.2, **facts: Any) -> tuple[Finding, ...]:
    norms = (b.norm(**{"fused": False, "device": "cuda"} | facts),)
    return judged("NP116", b.document(norms=norms, cost=b.cost(b.norm_cost(seconds=seconds))))


@pytest.mark.parametrize(("seconds", "told"), [(0.1, False), (0.11, True), (math.nan, True)])
def test_np116_at_its_limit(seconds: float, told: bool) -> None:
    assert severity(unfused(seconds)) == (Severity.NOTE if told else None)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, "F.rms_norm"),
        ({"kind": "layernorm", "affine": "weight+bias", "subtracts_mean": True}, "F.layer_norm"),
        ({"affine": "none"}, "F.rms_norm"),
        ({"axes": (-2, -1)}, "F.rms_norm"),
        ({"fused": True}, ""),
        ({"affine": "one_plus_weight"}, ""),
        ({"affine": "weight+bias"}, ""),
        ({"eps_placement": "outside_sqrt"}, ""),
        ({"eps_placement": "clamp"}, ""),
        ({"kind": "l2norm"}, ""),
        ({"axes": (1,)}, ""),
        ({"axes": (-3, -1)}, ""),
        ({"unbiased": True}, ""),
    ],
)
def test_np116_speaks_of_what_a_kernel_computes(facts: dict[str, Any], told: str) -> None:
    found = unfused(**facts)
    assert bool(found) == bool(told)
    if told:
        assert f"{told} computes the same" in found[0].message
        assert "20 % of the forward is spent in norms of 6 operations each" in found[0].message
        assert "3 times the bytes" in found[0].message


def test_np116_gathers_all_norms_and_asks_for_the_measure() -> None:
    norms = tuple(b.norm(f"blocks.{i}.norm", fused=False, device="cuda") for i in range(3))
    costs = [b.norm_cost(norm.path, seconds=0.05 + 0.01 * i) for i, norm in enumerate(norms)]
    (found,) = judged("NP116", b.document(norms=norms, cost=b.cost(*costs)))
    assert (found.where, len(found.every_place)) == ("blocks.2.norm", 3)
    _, (skipped,) = run(b.document(norms=norms), [find("NP116")])
    assert 'ask for the measure "cost"' in skipped.why
    assert run(b.document(), [find("NP116")]) == ((), ())


def test_np116_does_not_judge_what_torch_itself_runs_in_several_operations() -> None:
    norms = (b.norm("blocks.0.norm", fused=False, device="cpu"),)
    found, (skipped,) = run(b.document(norms=norms, cost=b.cost(b.norm_cost(seconds=0.3))), [find("NP116")])
    assert found == ()
    assert "no kernel for an RMS norm on a CPU" in skipped.why
