"""Gain of blocks against hand-written float64 forwards and closed forms."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from normprobe.measures.extra import Subject
from normprobe.measures.gain import Gain
from normprobe.records.gain import GainMeasure
from normprobe.report.tables import tables
from tests.measures.models import ResNet, anatomy_of, bert, shaken
from tests.models import MODELS, decoder, to_meta


def gain_of(model: nn.Module, inputs: Any, loss: Any = None) -> GainMeasure:
    found, skipped = Gain().measure(Subject(model, inputs, anatomy_of(model, inputs), loss=loss))
    assert skipped == ()
    assert found is not None
    return found


def square(output: Any, inputs: Any) -> Tensor:
    first = output if isinstance(output, Tensor) else next(iter(output.values()))
    return first.square().mean()


def sizes(states: list[Tensor]) -> list[float]:
    return [float(t.detach().square().mean().sqrt()) for t in states]


@pytest.mark.parametrize("placement", ["pre", "sandwich", "post"])
def test_gains_equal_those_of_a_float64_forward_by_hand(placement: str) -> None:
    model, ids = decoder(placement, final=placement != "post")
    (stream,) = gain_of(model, ids, square).streams
    wide = model.double()
    x = wide.embedding(ids)
    states = [x]
    for block in wide.blocks:
        x = block.mix(x)
        if placement == "post":  # the state is the sum, before its norm
            states.append(x + block.think.branch(x))
            x = block.think.norm(states[-1])
        else:
            x = block.think(x)
            states.append(x)
    loss = wide.head(x if wide.final is None else wide.final(x)).square().mean()
    rms, back = sizes(states), sizes(list(torch.autograd.grad(loss, states)))
    assert [b.block for b in stream.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [b.rms_in for b in stream.blocks] == pytest.approx(rms[:-1], rel=1e-5)
    assert [b.forward for b in stream.blocks] == pytest.approx([b / a for a, b in pairwise(rms)], rel=1e-5)
    assert [b.gradient_out for b in stream.blocks] == pytest.approx(back[1:], rel=1e-4)
    assert [b.backward for b in stream.blocks] == pytest.approx([a / b for a, b in pairwise(back)], rel=1e-4)
    assert stream.forward is not None
    assert stream.backward is not None
    assert stream.forward.total == pytest.approx(rms[-1] / rms[0], rel=1e-5)
    assert stream.forward.per_block == pytest.approx((rms[-1] / rms[0]) ** (1 / 3), rel=1e-5)
    assert stream.backward.total == pytest.approx(back[0] / back[-1], rel=1e-4)


def test_layers_of_a_model_without_a_stream_multiply_their_gains() -> None:
    """Orthogonal matrices times 1.5: each keeps every length but for the factor, both ways."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain=1.5)
    (chain,) = gain_of(nn.Sequential(*layers), torch.randn(6, 16)).streams
    assert [b.block for b in chain.blocks] == ["0", "1", "2", "3"]
    assert [b.until for b in chain.blocks] == [None] * 4
    assert [b.forward for b in chain.blocks] == pytest.approx([1.5] * 4)
    assert [b.backward for b in chain.blocks] == pytest.approx([1.5] * 4)
    assert chain.forward is not None
    assert chain.forward.total == pytest.approx(1.5**4)
    assert chain.forward.per_block == pytest.approx(1.5)


def test_a_row_says_where_it_ends_if_that_is_beyond_its_layer() -> None:
    again = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), again, nn.Tanh(), again, nn.GELU())
    x = torch.randn(6, 8)
    report = probe(model, x, measures=("gain", "jacobian"))
    assert report.measurements.gain is not None
    assert report.measurements.jacobian is not None
    (chain,), (other,) = report.measurements.gain.streams, report.measurements.jacobian.streams
    ends = [("0", 0, "before 2"), ("2", 0, None), ("3", 0, "before 3, run 2"), ("3", 1, "output")]
    assert [(b.block, b.execution, b.until) for b in chain.blocks] == ends
    assert [(b.block, b.execution, b.until) for b in other.blocks] == ends
    assert [b.square.end for b in other.blocks] == ["before 2", "after 2", "before 3, run 2", "output"]
    assert (other.whole.start, other.whole.end) == ("before 0", "output")
    states = [x, model[:2](x), model[:3](x), model[:5](x), model(x)]
    assert [b.rms_out for b in chain.blocks] == pytest.approx(sizes(states)[1:], rel=1e-5)
    for title in ("Gain of the model itself", "Jacobians"):
        (table,) = [table for table in tables(report.data) if table.title == title]
        assert [row[0] for row in table.rows][-4:] == ["0 … before 2", "2", "3 … before 3, run 2", "3 … output"]


def test_padding_is_left_out() -> None:
    case = bert()
    (stream,) = gain_of(case.model, case.inputs).streams
    states: list[Tensor] = []
    layers = case.model.encoder.layer
    hooks = [b.output.LayerNorm.register_forward_pre_hook(lambda m, args: states.append(args[0])) for b in layers]
    with torch.no_grad():
        case.model(**case.inputs)
    for hook in hooks:
        hook.remove()
    kept = case.inputs["attention_mask"].bool()
    assert [b.rms_out for b in stream.blocks] == pytest.approx(sizes([s[kept] for s in states]), rel=1e-5)
    assert sizes([states[0]])[0] != pytest.approx(stream.blocks[0].rms_out, rel=1e-4)
    assert stream.basis.count == int(kept.sum()) * states[0].shape[-1]


def test_a_trunk_scaled_before_its_first_add_has_no_entry() -> None:
    """The gradient of the scaled copy is not that of the stream."""
    model, ids = decoder("post", skip=1.7)
    found, skipped = Gain().measure(Subject(model, ids, anatomy_of(model, ids)))
    assert found is not None
    assert [b.block for b in found.streams[0].blocks] == ["blocks.1", "blocks.2"]
    (skip,) = skipped
    assert skip.what == "block blocks.0 of the residual stream blocks"
    assert "a copy or a multiple" in skip.why


def test_adds_in_place_are_taken_before_the_activation_in_place() -> None:
    model, x = shaken(ResNet()), torch.randn(2, 3, 5, 7)
    (stream,) = gain_of(model, x).streams
    with torch.no_grad():
        state, rms = model.stem(x), []
        for block in model.blocks:
            state = block(state) + state
            rms.append(float(state.square().mean().sqrt()))
            state = state.relu()
    assert [b.rms_out for b in stream.blocks] == pytest.approx(rms, rel=1e-5)


def test_a_dead_input_has_no_gain() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.zero_()
    (chain,) = gain_of(model, torch.randn(3, 4)).streams
    assert [b.forward for b in chain.blocks] == [0.0, None]
    assert chain.forward is None


def test_what_cannot_be_measured_is_skipped_with_a_reason() -> None:
    model, ids = decoder("pre")
    anatomy = anatomy_of(model, ids)
    found, (skip,) = Gain().measure(Subject(to_meta(model), ids, anatomy))
    assert found is None
    assert "meta" in skip.why


@pytest.mark.parametrize("name", MODELS)
def test_every_block_of_every_architecture_has_a_gain(name: str) -> None:
    model, inputs = MODELS[name]()
    report = probe(model, inputs, measures=("gain",))
    found = report.data.measurements.gain
    assert found is not None
    for stream, seen in zip(report.anatomy.streams, found.streams, strict=True):
        assert [b.block for b in seen.blocks] == list(dict.fromkeys(b.block for b in stream.branches))
        assert all(b.forward and b.backward and math.isfinite(b.forward * b.backward) for b in seen.blocks)
