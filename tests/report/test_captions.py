"""What is said below the curves, number by number."""

from __future__ import annotations

import math

import torch

from normprobe import probe
from normprobe.records import Headroom, ReportData, StreamMeasure
from normprobe.report.captions import spread, stream_captions
from normprobe.report.render import document
from normprobe.report.series import charts
from tests.measures.models import t5
from tests.models import decoder
from tests.report import examples


def stream() -> StreamMeasure:
    measure = examples.clean().measurements.residual[0]
    first, *_, last = measure.states
    numbers = {"write_ratio": 0.5, "write_share": 0.45, "write_cosine": -0.25, "angle": 1.5, "token_cosine": 0.75}
    more = {"stable_rank": 2.5, "first_rms": 30.0, "other_rms": 3.0, "bf16_loss": 0.125}
    headroom = Headroom(float16=51.25, bfloat16=1e35, float8_e4m3=0.5, float8_e5m2=40.0)
    update = {"states": (first, last.model_copy(update=numbers | more)), "independent_rms": 7.5}
    return measure.model_copy(update=update | {"effective_depth": 1.25, "headroom": headroom, "massive": ()})


def test_every_number_of_a_stream_is_said_with_its_name() -> None:
    _, writes, tokens, precision = stream_captions(stream())
    assert writes == (
        "writes: RMS over the trunk's 0.4 to 0.5",
        "over the sum's 0.3 to 0.45",
        "cosine with the trunk -0.25 to 0.1",
        "turn in radians 0.3 to 1.5",
        "independent writes would end at 7.5",
        "effective depth 1.25 of 2",
    )
    assert tokens == (
        "tokens: mean cosine 0.1 to 0.75",
        "stable rank 2.5 to 4",
        "RMS at the end of the first 30",
        "of the others 3",
    )
    assert precision == (
        "float16 holds the largest |x| 51.2 times",
        "share of a write that bfloat16 loses 0.004 to 0.125",
    )


def test_what_was_not_seen_is_not_said() -> None:
    unseen = ("write_ratio", "write_share", "write_cosine", "angle", "bf16_loss", "token_cosine", "stable_rank")
    unseen += ("first_rms", "other_rms")
    one = stream()
    states = tuple(state.model_copy(update=dict.fromkeys(unseen, math.nan)) for state in one.states)
    gone = {"independent_rms": math.nan, "effective_depth": math.nan, "headroom": None, "states": states}
    assert len(stream_captions(one.model_copy(update=gone))) == 1


def test_a_spread_is_two_ends_or_one_and_counts_what_is_not_finite() -> None:
    assert spread([0.3, 0.1]) == "0.1 to 0.3"
    assert spread([2.0, 2.0001]) == "2"
    assert spread([math.inf, 1.0]) == "1, 1 not finite"


def data_of_two_streams() -> ReportData:
    case = t5()
    return probe(case.model, case.inputs, level="backward", lr=1e-3).data


def test_ratio_and_slope_are_said_of_the_stream_that_they_are_of() -> None:
    data = data_of_two_streams()
    gradients = data.measurements.gradients
    assert gradients is not None
    assert gradients.stream == max(data.anatomy.streams, key=lambda one: one.depth).name
    (chart,) = [one for one in charts(data) if one.title == "Gradients"]
    said = {one.label: " · ".join(one.captions[0]) for one in chart.series}
    assert len(said) == 2
    assert [name for name, text in said.items() if "last to first" in text] == [gradients.stream]
    assert sum("loss" in text for text in said.values()) == 1
    for name, text in said.items():
        ratios = [b.adam_ratio for b in gradients.branches if b.stream == name and b.adam_ratio is not None]
        assert f"Adam's first step: {spread(ratios)}" in text


def test_logits_are_said_with_their_spread_and_their_operands() -> None:
    model, ids = decoder("pre")
    data = probe(model, ids).data
    heads = [head for site in data.measurements.attention for head in site.heads]
    text = document(data, "markdown")
    assert f"standard deviation {spread([head.std for head in heads])}" in text
    assert f"RMS of q {spread([head.q_rms for head in heads if head.q_rms is not None])}" in text
    assert "soft cap" not in text
    assert "sinks" not in text


def test_the_root_is_called_the_model_itself() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    text = document(probe(model, torch.randn(3, 4), measures=("gain", "jacobian")).data, "markdown")
    assert "Gain of the model itself" in text
    assert "the model itself, all layers" in text


def test_a_root_that_breaks_is_named_too() -> None:
    class Breaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 0.0 * 0.0

    text = document(probe(Breaks(), torch.ones(2, 3)).data, "rich")
    assert "first at the model itself" in text
    assert "aten.div.Tensor in the model itself gave the first" in " ".join(text.split())
