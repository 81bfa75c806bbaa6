"""How the values of one weight come from those of another."""

from __future__ import annotations

import math

import pytest
import torch

import normprobe
from normprobe.diffing.values import relate
from tests.diffing.models import decoder, tokens


def weight() -> torch.Tensor:
    return torch.randn(12, 8)


def test_relations() -> None:
    a = weight()
    assert relate(a, a.clone()) == ("equal", 0.0, pytest.approx(1.0))
    assert relate(a, a.bfloat16())[0] == "rounded"
    assert relate(a, a.half().float())[0] == "rounded"
    assert relate(a, 3 * a) == ("scaled", pytest.approx(2 / 3), pytest.approx(3.0))
    assert relate(a, -a)[0] == "scaled"
    assert relate(a, a[torch.randperm(12)])[0] == "reordered"
    assert relate(a, a[:, torch.randperm(8)])[0] == "different"
    assert relate(a, weight())[0] == "different"
    relation, distance, _ = relate(a, a * (1 + 1e-6 * torch.rand_like(a)))
    assert (relation, distance < 1e-6) == ("different", True)
    assert relate(a, torch.full_like(a, math.nan))[0] == "different"
    assert relate(a, a.bfloat16(), 1)[0] == relate(a.half(), a.bfloat16())[0] == "rounded"
    assert relate(torch.zeros(3, 3), torch.zeros(3, 3))[0] == "equal"


def test_a_bias_that_one_model_lacks() -> None:
    other = decoder()
    other.blocks[0].up.bias = None
    report = normprobe.diff(decoder(), other, tokens())
    pairs = [pair for pair in report.weights if pair.relation == "unlike"]
    assert [(pair.a, pair.b) for pair in pairs] == [(("blocks.0.up.bias",), ())]
    plain = decoder()
    with torch.no_grad():
        plain.blocks[0].up.bias.zero_()
    assert normprobe.diff(plain, other, tokens()).differences == ()


def test_one_weight_in_place_of_three() -> None:
    split, fused = decoder(), decoder(attention={"fused": True})
    state = split.state_dict()
    for path in (f"blocks.{i}.attention." for i in range(3)):
        state[f"{path}qkv.weight"] = torch.cat([state.pop(f"{path}{name}.weight") for name in "qkv"])
    fused.load_state_dict(state)
    report = normprobe.diff(split, fused, tokens())
    assert report.verdict == "same"
    assert {pair.relation for pair in report.weights} == {"equal"}
    assert (("blocks.0.attention.q.weight", "blocks.0.attention.k.weight", "blocks.0.attention.v.weight"),) in {
        (pair.a,) for pair in report.weights
    }
    with torch.no_grad():
        fused.blocks[1].attention.qkv.weight[40, 3] += 1
    report = normprobe.diff(split, fused, tokens())
    assert [pair.b for pair in report.weights if pair.relation == "different"] == [("blocks.1.attention.qkv.weight",)]


def test_fresh_weights_of_another_scale() -> None:
    other = decoder()
    with torch.no_grad():
        for block in other.blocks:
            block.down.weight.copy_(0.5 * torch.randn(32, 64))
    found = next(d for d in normprobe.diff(decoder(), other, tokens()).differences if d.fact == "init_std")
    assert found.severity.value == "warning"
    assert found.b == pytest.approx(0.5, rel=0.05)
    assert [path for path, _ in found.where] == [f"blocks.{i}.down.weight" for i in range(3)]


def test_buffers_of_other_values_are_errors_where_they_act() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1][1].running_mean += 1  # type: ignore[operator]
    found = normprobe.diff(*models, torch.randn(4, 8)).differences
    assert [(d.severity.value, f"{d.subject} {d.fact}") for d in found] == [
        ("error", "output values"),
        ("error", "weights buffers_values"),
    ]
