"""NP211: DeepNorm's two factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.records import BranchScale, WeightSite
from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import found, judge


def deepnorm(blocks: int, alpha: float, beta: float, odd: float | None = None) -> models.Built:
    """Untrained blocks `norm(alpha x + f(x))` with Xavier weights times beta; `odd` is the alpha of one block."""
    model, inputs = models.decoder("post", final=False, layers=blocks, skip=alpha)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter, gain=beta if "out" in name or "down" in name or "up" in name else 1.0)
        else:
            nn.init.constant_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0)
    if odd is not None:
        model.get_submodule("blocks.1.mix").skip = odd
    return model.eval(), inputs


def published(blocks: int) -> tuple[float, float]:
    return (2 * blocks) ** 0.25, (8 * blocks) ** -0.25


@pytest.mark.parametrize("blocks", [2, 4, 6])
def test_np211_is_silent_on_both_factors(blocks: int) -> None:
    assert found("NP211", *deepnorm(blocks, *published(blocks)), level="forward") == ()


@pytest.mark.parametrize("blocks", [2, 4, 6])
def test_np211_measures_what_alpha_without_beta_allows(blocks: int) -> None:
    alpha, _ = published(blocks)
    (finding,) = found("NP211", *deepnorm(blocks, alpha, 1.0), level="forward")
    assert isinstance(finding.value, float)
    assert finding.value == pytest.approx(4 * blocks / alpha**2, rel=0.2)  # 2N writes of 2·1²/α², the largest of two
    assert (finding.limit, finding.severity.value) == (2.0, "warning")


@pytest.mark.parametrize("blocks", [3, 6, 16])
def test_np211_finds_beta_without_alpha(blocks: int) -> None:
    alpha, beta = published(blocks)
    (finding,) = found("NP211", *deepnorm(blocks, 1.0, beta), level="forward")
    assert (finding.value, finding.severity.value) == (1.0, "warning")
    assert finding.limit == pytest.approx(alpha)
    assert f"at {beta:.4g} of Xavier's scale" in finding.message
    assert found("NP211", *deepnorm(blocks, 1.0, 1.0), level="forward") == ()


@pytest.mark.parametrize("odd", [1.0, 3.0])
def test_np211_finds_a_layer_with_another_alpha(odd: float) -> None:
    (finding,) = found("NP211", *deepnorm(4, *published(4), odd=odd))
    assert (finding.where, finding.value) == ("blocks.1.mix", odd)
    assert "is multiplied by" in finding.message


def test_np211_needs_weights_and_says_so() -> None:
    model, inputs = deepnorm(4, 2.0, 1.0)
    report = normprobe.probe(models.to_meta(model), inputs)
    assert [f for f in report.findings if f.code == "NP211"] == []
    assert "the scale of the weights was not measured" in [s.why for s in report.skipped if s.what.startswith("NP211")]


def stream(alphas: list[float | None], kinds: list[str] | None = None) -> Any:
    writes = tuple(
        b.branch(
            f"blocks.{i}",
            kind=(kinds or ["mlp"] * len(alphas))[i],
            placement="deepnorm" if alpha != 1.0 else "post",
            skip_scale=alpha,
            writers=(f"w{i}",),
        )
        for i, alpha in enumerate(alphas)
    )
    return b.stream(branches=writes, depth=len(writes), placement="deepnorm", final_norm=None, needs_final_norm=False)


def test_np211_leaves_interpolations_alone() -> None:
    """norm(0.9 x + 0.1 f(x)), as in nGPT, is no DeepNorm."""
    assert judge("NP211", b.document(streams=(stream([0.9] * 4),))) == ((), ())
    assert judge("NP211", b.document(streams=(stream([0.9, 0.8, 0.9, 0.8]),))) == ((), ())


def weighed(count: int, trained: bool | None, std: float) -> Any:
    """Square writers of width 8: a standard deviation of √(1/8) is Xavier's."""
    site = {"roles": ("writer",), "shape": (8, 8), "fan_in": 8, "fan_out": 8, "output_axis": 0}
    site |= {"kind": "linear", "operand": 1}
    sites = tuple(WeightSite(parameter=f"w{i}", site=b.branch("x").add, **site) for i in range(count))
    data = b.document(streams=(stream([2.0] * count),))
    init = b.init(trained=trained, **{f"w{i}": std for i in range(count)})
    return data.model_copy(
        update={
            "anatomy": data.anatomy.model_copy(update={"weights": sites}),
            "measurements": data.measurements.model_copy(update={"init": init}),
        }
    )


def test_np211_stands_at_its_limit() -> None:
    xavier = math.sqrt(1 / 8)
    assert judge("NP211", weighed(4, False, xavier * (1 - 1e-9))) == ((), ())  # 4 · 2 · 1 / 4
    assert judge("NP211", weighed(4, False, xavier * 1.001))[0][0].value == pytest.approx(2.0, rel=0.01)
    assert judge("NP211", weighed(4, True, 9.0)) == ((), ())
    nothing, (skipped,) = judge("NP211", weighed(4, None, 9.0))
    assert (nothing, skipped.why) == ((), "it cannot be told whether the weights are as they were drawn")


def beta_alone(trained: bool | None = False, placement: str = "post", recipes: tuple[str, ...] = ("deepnorm",)) -> Any:
    writes = tuple(b.branch(f"{i}", placement=placement, writers=(f"w{i}", f"w{i}.bias")) for i in range(4))
    stream = b.stream(branches=writes, depth=4, placement="post", final_norm=None, needs_final_norm=False)
    drawn = b.drawn(*(b.weight(f"w{i}", recipes=recipes) for i in range(4)), trained=trained)
    return b.document(streams=(stream,), init=drawn)


def test_np211_is_sure_that_beta_is_meant() -> None:
    assert len(judge("NP211", beta_alone())[0]) == 1
    assert len(judge("NP211", beta_alone(recipes=("deepnorm", "t_fixup_encoder")))[0]) == 1
    for sound in (
        beta_alone(trained=None),
        beta_alone(trained=True),
        beta_alone(placement="pre"),
        beta_alone(recipes=()),
        beta_alone(recipes=("deepnorm", "fixed_0.02")),
        beta_alone(recipes=("deepnorm", "xavier_depth")),
    ):
        assert judge("NP211", sound) == ((), ())


def test_np211_counts_the_largest_writer_of_a_branch() -> None:
    """One writer of two at Xavier's scale is as far from β as both."""
    data = weighed(4, False, math.sqrt(1 / 8))
    writes = tuple(
        branch.model_copy(update={"writers": ("w0", "small")}) for branch in data.anatomy.streams[0].branches
    )
    small = data.anatomy.weights[0].model_copy(update={"parameter": "small"})
    stds = {"w0": math.sqrt(1 / 8) * 1.01, "small": 1e-3}
    streams = (data.anatomy.streams[0].model_copy(update={"branches": writes}),)
    anatomy = data.anatomy.model_copy(update={"streams": streams, "weights": (*data.anatomy.weights, small)})
    measured = data.measurements.model_copy(update={"init": b.init(trained=False, **stds)})
    (finding,), _ = judge("NP211", data.model_copy(update={"anatomy": anatomy, "measurements": measured}))
    assert finding.value == pytest.approx(2 * 1.01**2)


@pytest.mark.parametrize(
    ("more", "update"),
    [
        ({"branch_scale": BranchScale(kind="constant", value=0.5)}, None),
        ({"branch_scale": BranchScale(kind="constant", value=1.5)}, 4.5),
        ({"branch_scale": BranchScale(kind="gate")}, "the scale of some writers is not known"),
        ({"output_norm": "n"}, "the scale of some writers is not known"),
    ],
)
def test_np211_takes_what_stands_behind_the_writers_into_account(more: dict[str, Any], update: Any) -> None:
    data = weighed(4, False, 1.001 * math.sqrt(1 / 8))
    held = data.anatomy.streams[0]
    stream = held.model_copy(update={"branches": tuple(one.model_copy(update=more) for one in held.branches)})
    anatomy = data.anatomy.model_copy(update={"streams": (stream,)})
    found_, skipped = judge("NP211", data.model_copy(update={"anatomy": anatomy}))
    assert [one.why for one in skipped] == ([update] if isinstance(update, str) else [])
    assert [one.value for one in found_] == ([pytest.approx(update, rel=0.01)] if isinstance(update, float) else [])


@pytest.mark.parametrize("more", [{"branch_scale": BranchScale(kind="scalar", value=0.1)}, {"output_norm": "n"}])
def test_np211_takes_no_start_for_beta_that_a_factor_or_a_norm_changes(more: dict[str, Any]) -> None:
    data = beta_alone()
    held = data.anatomy.streams[0]
    stream = held.model_copy(update={"branches": tuple(one.model_copy(update=more) for one in held.branches)})
    anatomy = data.anatomy.model_copy(update={"streams": (stream,)})
    assert judge("NP211", data.model_copy(update={"anatomy": anatomy})) == ((), ())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_np211_lets_no_broken_weight_pass(value: float) -> None:
    assert len(judge("NP211", weighed(4, False, value))[0]) == 1


def test_np211_compares_branches_of_one_kind_and_skips_learned_factors() -> None:
    kinds = ["attention", "mlp"] * 2
    found_, _ = judge("NP211", b.document(streams=(stream([2.0, 3.0] * 2, kinds),)))
    assert found_ == ()
    found_, (skipped,) = judge("NP211", b.document(streams=(stream([2.0, None]),)))
    assert (found_, skipped.why) == ((), "the factor on the trunk is no constant")
    assert judge("NP211", b.document()) == ((), ())
