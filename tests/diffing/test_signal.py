"""The first site that parts is where the difference was planted, and rounding is no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.diffing.signal import first_parting
from normprobe.records.diff import SignalDiff, SiteDiff
from tests.diffing.models import Decoder, decoder, tokens, twin
from tests.trace import Snapshot


def signal(a: nn.Module, b: nn.Module, inputs: Any = None) -> SignalDiff:
    found = normprobe.diff(a, b, tokens() if inputs is None else inputs).signal
    assert found is not None
    return found


def first(found: SignalDiff) -> tuple[str, str]:
    assert found.first is not None
    site = found.sites[found.first]
    return site.kind, site.a


def scaled(module: Any, name: str = "weight") -> None:
    with torch.no_grad():
        getattr(module, name).mul_(1.001)


PLANTED: dict[str, tuple[Callable[[Any], None], tuple[str, str]]] = {
    "embedding": (lambda m: scaled(m.embedding), ("entry", "blocks")),
    "first norm": (lambda m: scaled(m.blocks[0].first), ("norm", "blocks.0.first")),
    "later norm": (lambda m: scaled(m.blocks[2].second), ("norm", "blocks.2.second")),
    "values": (lambda m: scaled(m.blocks[1].attention.v), ("mixed", "blocks.1.attention.out")),
    "queries": (lambda m: scaled(m.blocks[1].attention.q), ("mixed", "blocks.1.attention.out")),
    "attention writer": (lambda m: scaled(m.blocks[1].attention.out), ("write", "blocks.1")),
    "MLP reader": (lambda m: scaled(m.blocks[2].up), ("mixed", "blocks.2.down")),
    "MLP writer": (lambda m: scaled(m.blocks[2].down), ("write", "blocks.2")),
    "writer's bias": (lambda m: scaled(m.blocks[0].down, "bias"), ("write", "blocks.0")),
    "final norm": (lambda m: scaled(m.norm), ("head", "head")),
    "head": (lambda m: scaled(m.head), ("output", "output")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_site_that_parts_is_where_it_was_planted(name: str) -> None:
    plant, expected = PLANTED[name]
    other = decoder()
    plant(other)
    found = signal(decoder(), other)
    assert first(found) == expected
    assert not any(site.step for site in found.sites[: found.first])
    assert found.sites[-1].step


def test_layers_in_a_row_are_told_apart_without_a_stream() -> None:
    def row() -> nn.Sequential:
        torch.manual_seed(4)
        parts = [part for width in (3, 8, 8) for part in (nn.Conv2d(width, 8, 3), nn.ReLU())]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 36, 4)).eval()

    other = row()
    scaled(other[2])
    report = normprobe.diff(row(), other, torch.randn(2, 3, 12, 12))
    assert report.signal is not None
    assert first(report.signal) == ("product", "4")
    assert [pair.a for pair in report.weights if pair.relation != "equal"] == [("2.weight",)]


def test_the_step_has_its_size() -> None:
    other = decoder()
    scaled(other.blocks[1].attention.out)
    found = signal(decoder(), other)
    assert found.first is not None
    site = found.sites[found.first]
    assert site.error == pytest.approx(1e-3 / 1.001, rel=1e-3)
    assert site.cosine == pytest.approx(1.0, abs=1e-9)
    assert site.rms_b == pytest.approx(1.001 * site.rms_a, rel=1e-5)
    assert site.noise < 1e-6 < site.error


def test_a_step_of_a_large_state_is_told_from_sums() -> None:
    other = decoder()
    scaled(other.blocks[1].attention.out)
    found = signal(decoder(), other, tokens(200))
    assert found.first is not None
    site = found.sites[found.first]
    assert not site.exact
    assert site.count == 2 * 200 * 32
    assert site.error == pytest.approx(1e-3 / 1.001, rel=0.1)


class Reordered(nn.Linear):
    """The same product summed in pieces, the last one first."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parts = zip(input.split(8, -1), self.weight.split(8, -1), strict=True)
        total = sum((x @ w.T for x, w in reversed(list(parts))), torch.zeros(()))
        return total if self.bias is None else total + self.bias


def reordered(model: Decoder) -> Decoder:
    for block in model.blocks:
        for layer in list(block.modules()):
            if isinstance(layer, nn.Linear):
                layer.__class__ = Reordered
    return model


def test_another_order_of_summation_is_rounding() -> None:
    report = normprobe.diff(decoder(), reordered(decoder()), tokens())
    assert report.verdict == "same"
    assert report.output is not None
    assert 0 < report.output.max_abs < 1e-4
    assert report.signal is not None
    assert report.signal.first is None


class Written(nn.Module):
    """LayerNorm without its fused kernel."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.flip(-1).cumsum(-1)[..., -1:] / x.shape[-1]
        centred = x - mean
        return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def test_rounding_that_a_layer_amplifies_is_rounding() -> None:
    models = [decoder(), decoder()]
    for model in models:
        with torch.no_grad():
            model.embedding.weight += 3000
        for block in model.blocks:
            block.first, block.second = nn.LayerNorm(32), nn.LayerNorm(32)
        model.norm = nn.LayerNorm(32)
    for block in models[1].blocks:
        block.first, block.second = Written(block.first), Written(block.second)
    report = normprobe.diff(*models, tokens())
    assert report.signal is not None
    site = next(site for site in report.signal.sites if site.kind == "norm")
    assert site.error > 1e-5  # a thousand times the spacing of float32 would be a step elsewhere
    assert report.signal.first is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounding(dtype: torch.dtype) -> None:
    report = normprobe.diff(decoder(), twin(decoder()).to(dtype), tokens())
    assert {(d.severity.value, d.fact) for d in report.differences} == {("warning", "dtype"), ("note", "rounded")}
    assert report.signal is not None
    assert (report.signal.dtype, report.signal.narrowed) == ("float32", str(dtype).removeprefix("torch."))
    assert report.signal.first is None
    assert {pair.relation for pair in report.weights} == {"rounded"}
    assert not report.failed("error")


def test_floating_inputs_are_cast_for_a_model_of_another_dtype() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    report = normprobe.diff(model, twin(model).bfloat16(), torch.randn(2, 3, 8, 8))
    assert report.data.notes == ("the inputs of B were cast to bfloat16, the dtype of its weights",)
    assert report.signal is not None
    assert report.signal.first is None
    assert report.signal.sites[-1].error < 1e-6
    assert not report.failed("error")


def test_a_step_is_seen_below_the_rounding_of_half_precision() -> None:
    other = twin(decoder()).to(torch.bfloat16)
    other.blocks[1].second.eps = 2e-5
    assert first(signal(twin(decoder()).to(torch.bfloat16), other)) == ("norm", "blocks.1.second")


def test_float64_sees_more() -> None:
    other = twin(decoder()).double()
    other.blocks[1].second.eps = 1e-6 * (1 + 1e-5)
    found = signal(twin(decoder()), twin(other).float())
    assert found.first is None
    assert found.dtype == "float32"


def test_features_in_another_order_come_together_again() -> None:
    other = decoder()
    order = torch.randperm(64)
    with torch.no_grad():
        for part in (other.blocks[1].up.weight, other.blocks[1].up.bias):
            part.copy_(part[order])
        other.blocks[1].down.weight.copy_(other.blocks[1].down.weight[:, order])
    report = normprobe.diff(decoder(), other, tokens())
    assert report.verdict == "same"
    assert report.signal is not None
    assert report.signal.first is None
    assert [report.signal.sites[i].a for i in report.signal.passing] == ["blocks.1.down"]
    assert {d.fact for d in report.differences} == {"inner_form", "reordered", "values"}
    assert {d.severity.value for d in report.differences} == {"note"}


def test_values_that_are_not_finite() -> None:
    other = decoder()
    with torch.no_grad():
        other.blocks[1].down.bias[0] = torch.nan
    found = signal(decoder(), other)
    assert first(found) == ("write", "blocks.1")
    assert found.sites[found.first or 0].error == float("inf")
    both = normprobe.diff(other, twin(other), tokens())
    assert both.verdict == "unknown"


def site(kind: Any, step: bool | None, branch: int | None = 0) -> SiteDiff:
    return SiteDiff(
        kind=kind, a="a", b="b", branch=branch, error=0, noise=0, limit=0, step=step, rms_a=1, rms_b=1, cosine=1,
        count=1, exact=True,
    )  # fmt: skip


def test_first_parting_by_hand() -> None:
    rows = [site("norm", True), site("write", False), site("stream", False), site("write", True, 1)]
    assert first_parting(rows) == (3, (0,))
    assert first_parting(rows[:3]) == (None, (0,))
    assert first_parting([site("norm", True), site("write", True)]) == (0, ())
    assert first_parting([site("norm", True)]) == (0, ())
    assert first_parting([site("norm", None)]) == (None, ())
    assert first_parting([]) == (None, ())


def test_both_models_are_left_as_they_were() -> None:
    a, b = decoder(), twin(decoder()).to(torch.bfloat16)
    a.train()
    inputs = tokens()
    before = Snapshot(a, inputs), Snapshot(b, inputs)
    normprobe.diff(a, b, inputs)
    for one in before:
        one.assert_kept()


def test_a_model_against_itself() -> None:
    model = decoder()
    assert normprobe.diff(model, model, tokens()).verdict == "same"
