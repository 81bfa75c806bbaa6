"""The checks of initialisation on records: NP601 to NP606."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import Finding, ReportData, Skipped
from normprobe.records.init import BlockedBranch
from tests.checks import builders as b
from tests.checks.test_contract import FAULTS

ALL = ("NP601", "NP602", "NP603", "NP604", "NP605", "NP606")


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, [find(code)])


def stack(layers: int, moment: float, recipe: str, cut: int | None = None, by: str = "relu", **more: Any) -> ReportData:
    """A row of layers, each behind the one before it, but for `cut`."""
    facts: dict[str, Any] = {"followed_by": by, "moment": moment, "recipes": (recipe,)}
    rows = (b.weight(f"{i}.weight", **facts) for i in range(layers))
    sources = [f"{i - 1}.weight" if i not in (0, cut) else None for i in range(layers)]
    sites = tuple(b.weight_site(f"{i}.weight", source=source, stream=None) for i, source in enumerate(sources))
    return b.document(**{"norms": (), "streams": (), "weights": sites, "init": b.drawn(*rows), **more})


@pytest.mark.parametrize("code", ALL)
def test_trained_weights_are_not_judged(code: str) -> None:
    data = FAULTS[code]()
    assert data.measurements.init is not None
    for trained, open_too in ((True, False), (None, code in ("NP605", "NP606"))):
        init = data.measurements.init.model_copy(update={"trained": trained})
        measured = data.measurements.model_copy(update={"init": init})
        found, _ = judge(code, data.model_copy(update={"measurements": measured}))
        assert bool(found) == open_too


def test_np601_takes_one_layer_that_loses_all_for_another_recipe() -> None:
    """A small kernel drawn with 0.02 fits Xavier's deviation by chance; a linear gain loses half of the variance."""
    assert judge("NP601", stack(1, 0.0025, "xavier")) == ((), ())
    assert len(judge("NP601", stack(2, 0.0025, "xavier"))[0]) == 1


def test_np601_multiplies_what_each_layer_leaves() -> None:
    assert judge("NP601", stack(4, 0.5, "xavier")) == ((), ())
    (found,), _ = judge("NP601", stack(5, 0.5, "xavier"))
    assert found.value == pytest.approx(0.5**2.5)
    assert found.message == "5 layers in a row before a ReLU, drawn by xavier, leave 0.1768 of the signal's RMS"
    assert len(found.places) == 5
    (default,), _ = judge("NP601", stack(2, 1 / 6, "torch_default"))
    assert (default.severity.value, found.severity.value) == ("note", "warning")


@pytest.mark.parametrize("more", [{}, {"streams": (b.stream(),)}, {"norms": (b.norm(),)}])
def test_np601_looks_at_rows_whatever_else_the_model_has(more: dict[str, Any]) -> None:
    assert judge("NP601", stack(8, 0.5, "xavier", cut=4, **more)) == ((), ())
    (found,), _ = judge("NP601", stack(9, 0.5, "xavier", cut=4, **more))
    assert (found.where, found.value, len(found.places)) == ("4.weight", pytest.approx(0.5**2.5), 5)
    (found,), _ = judge("NP601", stack(10, 0.4, "xavier", cut=5, by="gelu", **more))
    assert found.message.endswith(
        "before a GELU, drawn by xavier, leave at most 0.1012 of the signal's RMS; 2 rows of layers do so"
    )
    assert len(found.places) == 10
    assert len(judge("NP601", stack(9, 1 / 6, "torch_default", **more))[0]) == (not more)


@pytest.mark.parametrize(
    "more",
    [
        {"by": "tanh"},
        {"recipe": "kaiming"},
        {"moment": 1.0},
        {"init": b.drawn(*(b.weight(f"{i}", followed_by="relu", moment=1.0, recipes=("kaiming",)) for i in range(20)))},
        {"init": b.drawn(*(b.weight(f"{i}", followed_by="norm", moment=None) for i in range(20)))},
    ],
)
def test_np601_passes_what_is_normed_or_drawn_for_relu(more: dict[str, Any]) -> None:
    assert judge("NP601", stack(**{"layers": 20, "moment": 0.5, "recipe": "xavier"} | more)) == ((), ())


def drawn_as(data: ReportData, role: str, every: int = 1, **facts: Any) -> ReportData:
    """The same with other facts of the weights of this role; without a recipe but for each `every`-th."""
    init = data.measurements.init
    assert init is not None
    held = [w for w in init.weights if role in w.roles]
    kept = held[::every]
    made = {w.parameter: w.model_copy(update=facts | ({} if w in kept else {"recipes": ()})) for w in held}
    rows = tuple(made.get(w.parameter, w) for w in init.weights)
    measured = data.measurements.model_copy(update={"init": init.model_copy(update={"weights": rows})})
    return data.model_copy(update={"measurements": measured})


def normed_streams(field: str) -> ReportData:
    """Writes that grow a stream, with a norm behind each or behind each sum."""
    data = b.unscaled(24)
    (stream,) = data.anatomy.streams
    branches = tuple(branch.model_copy(update={field: f"{branch.path}.after"}) for branch in stream.branches)
    streams = (stream.model_copy(update={"branches": branches}),)
    return data.model_copy(update={"anatomy": data.anatomy.model_copy(update={"streams": streams})})


def by_chance(data: ReportData, **facts: Any) -> ReportData:
    """The same, but that one writer is drawn a little off."""
    init = data.measurements.init
    assert init is not None
    odd = next(w for w in init.weights if "writer" in w.roles)
    off = odd.model_copy(update={"interval": (0.0205, 0.021), "recipes": (), **facts})
    rows = tuple(off if w is odd else w for w in init.weights)
    measured = data.measurements.model_copy(update={"init": init.model_copy(update={"weights": rows})})
    return data.model_copy(update={"measurements": measured})


NO_RECIPE: dict[str, Any] = {"recipes": (), "std": 0.1, "interval": (0.099, 0.101)}
SMALL: dict[str, Any] = {"std": 0.0105, "interval": (0.010, 0.011)}


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (b.unscaled(24), "with a standard deviation of 0.02 like the readers'"),
        (drawn_as(drawn_as(b.unscaled(24), "writer", **NO_RECIPE), "reader", **NO_RECIPE), "like the readers'"),
        (drawn_as(b.unscaled(24, recipes=("xavier",)), "writer", **SMALL), "by xavier"),
        (by_chance(b.unscaled(24)), "with a standard deviation of 0.02 like the readers'"),
        (by_chance(drawn_as(b.unscaled(24, recipes=("xavier",)), "writer", **SMALL)), "by xavier"),
        (by_chance(b.unscaled(24), recipes=("gpt2_depth",)), "like the readers'"),
        (drawn_as(b.unscaled(24, recipes=("lecun", "torch_default")), "writer", **SMALL), "by torch_default"),
    ],
)
def test_np602_notes_a_deep_stream_that_grows(data: ReportData, how: str) -> None:
    (found,), _ = judge("NP602", data)
    assert (found.severity.value, found.value) == ("note", 2.5)
    assert f"{how}, and the RMS of the stream grows to 2.5 times" in found.message
    assert "divided by √24, 4.899," in found.message


@pytest.mark.parametrize(
    "data",
    [
        b.unscaled(23),
        b.unscaled(24, grown=2.0),
        b.unscaled(24, recipes=("gpt2_depth",)),
        b.unscaled(24, recipes=("fixed_0.02", "gpt2_depth")),
        b.unscaled(24, recipes=("xavier", "fixup")),
        b.unscaled(24, recipes=("zero",)),
        drawn_as(b.unscaled(24, recipes=("fixed_0.006",)), "writer", **SMALL),
        drawn_as(b.unscaled(24, recipes=()), "writer", **SMALL),
        drawn_as(b.unscaled(24, recipes=("xavier",)), "writer", **SMALL, every=2),
        normed_streams("post_norm"),
        normed_streams("output_norm"),
    ],
)
def test_np602_passes_shallow_even_and_scaled_streams(data: ReportData) -> None:
    assert judge("NP602", data) == ((), ())


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((0.3536, (0.35, 0.36)), None),
        ((0.30, (0.29, 0.31)), None),  # a ratio of 1.18
        ((0.29, (0.28, 0.30)), 1.219),
        ((0.29, (0.28, 0.3501)), None),  # chance
        ((0.9, (0.89, 0.91)), 0.3929),
        ((0.0, (0.0, 0.0)), math.inf),
    ],
)
def test_np603_compares_with_the_own_class(own: tuple[float, tuple[float, float]], expected: float | None) -> None:
    found, _ = judge("NP603", b.document(init=b.drawn(b.weight(own=own))))
    assert [f.value for f in found] == ([] if expected is None else [pytest.approx(expected, rel=1e-3)])


def test_np603_gathers_by_role_and_direction_and_says_why_it_could_not() -> None:
    rows = [b.weight(str(i), own=(0.1, (0.09, 0.11))) for i in range(3)]
    rows += [b.weight("head", roles=("head",), own=(0.1, (0.09, 0.11))), b.weight("other", own=(0.9, (0.89, 0.91)))]
    found, _ = judge("NP603", b.document(init=b.drawn(*rows)))
    assert sorted(len(f.places) for f in found) == [0, 0, 3]
    _, (skipped,) = judge("NP603", b.document(init=b.drawn(own_reason="too large")))
    assert skipped.why == "too large"


@pytest.mark.parametrize(
    ("site", "count", "told"),
    [({"output_axis": 1}, 2, True), ({"kind": "experts"}, 2, True), ({"output_axis": 1}, 1, False), ({}, 5, False)],
)
def test_np604_wants_two_weights_and_a_layout_that_is_misread(site: dict[str, Any], count: int, told: bool) -> None:
    sites = tuple(b.weight_site(f"{i}", **site) for i in range(count))
    rows = (b.weight(f"{i}", recipes=(), misread=("kaiming",)) for i in range(count))
    found, _ = judge("NP604", b.document(weights=sites, init=b.drawn(*rows)))
    assert bool(found) == told


def test_np605_names_the_constant() -> None:
    row = b.weight(same_outputs=True, distribution="constant", mean=0.25)
    (found,), _ = judge("NP605", b.document(init=b.drawn(row)))
    assert "the constant 0.25" in found.message


def part(count: int, site: dict[str, Any] | None = None, **more: Any) -> ReportData:
    rows = b.drawn(b.weight("w", repeated=count, **more))
    return b.document(weights=(b.weight_site("w", **{"shape": (100, 8)} | (site or {})),), init=rows)


def test_np605_counts_outputs_that_are_the_same_in_part() -> None:
    (found,), _ = judge("NP605", part(50, alike=50))
    assert (found.severity.value, found.value, found.limit) == ("warning", 0.5, 0.02)
    assert found.message == "50 of its 100 outputs are the same as another, and so are their gradients"
    assert len(judge("NP605", part(3))[0]) == 1
    assert judge("NP605", part(2)) == ((), ())
    assert judge("NP605", part(0, {"shape": (8, 0), "fan_in": 0})) == ((), ())
    assert judge("NP605", part(50, roles=("head",))) == ((), ())
    (whole,), _ = judge("NP605", part(99, same_outputs=True))
    assert whole.message.startswith("all its outputs")
    experts = {"kind": "experts", "shape": (4, 16, 8), "output_axis": 1}
    (found,), _ = judge(
        "NP605", b.document(weights=(b.weight_site("w", **experts),), init=b.drawn(b.weight("w", repeated=8)))
    )
    assert found.value == 8 / 64


@pytest.mark.parametrize(
    ("alike", "level", "severity", "end"),
    [
        (None, "forward", "note", "another; gradients (--backward) tell whether they stay so"),
        (None, "backward", "note", "the same as another"),  # one gets no gradient
        (0, "backward", "note", "another; their gradients differ, so that they part in training"),
        (2, "backward", "note", "50 of its 100 outputs are the same as another, and so are their gradients"),
        (3, "backward", "warning", "3 of its 100 outputs are the same as another, and so are their gradients"),
    ],
)
def test_np605_warns_of_a_part_by_its_gradients(alike: int | None, level: Any, severity: str, end: str) -> None:
    (found,), _ = judge("NP605", part(50, alike=alike).model_copy(update={"level": level}))
    assert (found.severity.value, found.message.endswith(end)) == (severity, True)


def test_np605_notes_experts_that_are_copies() -> None:
    (found,), _ = judge("NP605", part(0, copies=3))
    assert (found.severity.value, found.value) == ("note", 3)
    rows = b.drawn(b.weight("a"), b.weight("b", copy_of="a"), b.weight("c", copy_of="a"))
    (found,), _ = judge("NP605", b.document(init=rows))
    assert (found.severity.value, found.value, found.places) == ("note", 2, ("b", "c"))


def test_np606_is_sure_of_zeros_and_warns_by_gradients() -> None:
    idle = b.gradients(norm_=0.0)
    (found,), _ = judge("NP606", b.document(gradients=idle))
    assert (found.severity.value, found.places) == ("warning", ("blocks.0", "blocks.1"))
    zeros = tuple(BlockedBranch(stream="blocks", branch=i, path=f"blocks.{i}", zeros=("a", "b")) for i in range(2))
    (found,), _ = judge("NP606", b.document(gradients=idle, init=b.drawn(blocked=zeros)))
    assert (found.severity.value, "a and b are 0 and stay so" in found.message) == ("error", True)
    (found,), _ = judge("NP606", b.document(gradients=idle, init=b.drawn(closed=(("blocks", 0),))))
    assert (found.severity.value, found.where) == ("warning", "blocks.1")
    lost = b.gradients(norm_=0.0, sizes=(0.0, 0.0))  # the loss does not read the stream
    assert judge("NP606", b.document(gradients=lost)) == ((), ())
