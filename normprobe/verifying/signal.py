"""Classic results 4 to 6: gradients by depth, second moments behind a ReLU, and the growth of the stream."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normprobe import theory
from normprobe.measures.gradients import measure_gradients
from normprobe.probing import probe
from normprobe.records import StreamMeasure
from normprobe.records.verification import Verified
from normprobe.verifying import forms
from normprobe.verifying.judging import Claim
from normprobe.verifying.models import Block, stack

_GRADIENTS, _RELU, _GROWTH = "gradients by depth", "second moment behind a ReLU", "growth of the residual stream"
_BLOCKS, _WIDTH, _ROWS, _SEEDS = 48, 64, 16, range(8)
_WRITES, _WIDE, _WIDEST, _MANY = 50, 256, 1024, 256


def gradients() -> Iterator[Verified]:
    """Norm of the weight gradient of the last block over that of the first, at torch's own initialisation."""
    for name, post, expected in (("pre", False, 0.413), ("post", True, 1.727)):
        ratios = _ratios(post)
        claim = f"last-to-first weight-gradient ratio of {_BLOCKS} {name}-norm blocks of width {_WIDTH}, seed 0"
        source = "torch's own float64 backward; below 1 for pre-norm alone: Xiong et al. 2020, theorem 1"
        note = f"seeds {_SEEDS[0]} to {_SEEDS[-1]}: {min(ratios):.2f} to {max(ratios):.2f}"
        yield Claim(f"{name}-norm-gradients", _GRADIENTS, claim, expected, 0.03, source).judged(ratios[0], note)


def _ratios(post: bool) -> list[float]:
    """The ratio by seed, of the mean square of the output as loss; the data flow is the same for all seeds."""
    anatomy, found = None, []
    for seed in _SEEDS:
        torch.manual_seed(seed)
        inputs = torch.randn(_ROWS, _WIDTH)
        model = stack(_BLOCKS, _WIDTH, nn.GELU(), post=post)
        anatomy = anatomy or probe(model, inputs, level="structure").anatomy
        measure, _ = measure_gradients(model, inputs, anatomy)
        found.append(math.nan if measure is None else measure.last_to_first)
    return found


def relu() -> Iterator[Verified]:
    """Second moment of relu(W x) for x of unit second moment, under He's variance and under 1/fan_in."""
    recipes = {"kaiming": theory.kaiming_std(_WIDEST), "lecun": theory.lecun_std(_WIDEST)}
    for name, std in recipes.items():
        torch.manual_seed(0)
        stream = _stream(Block(_WIDEST, nn.ReLU(), std=std), _WIDEST)
        variance = "2/fan_in" if name == "kaiming" else "1/fan_in"
        claim = f"second moment behind a ReLU for weights of variance {variance}, fan_in {_WIDEST}"
        expected = forms.relu_second_moment(std**2, _WIDEST)
        written = stream.states[0].write_rms ** 2 if stream else math.nan
        yield Claim(f"relu-{name}", _RELU, claim, expected, 0.02, "He et al. 2015, eq. 8 and 9").judged(written)


def growth() -> Iterator[Verified]:
    """Variance of a pre-norm stream after 50 independent unit writes, and with GPT-2's factor on the writers."""
    factors = {"unscaled": 1.0, "scaled": theory.residual_init_factor(_WRITES)}
    for name, factor in factors.items():
        torch.manual_seed(0)
        stream = _stream(stack(_WRITES, _WIDE, std=factor * theory.lecun_std(_WIDE)), _WIDE)
        scaled = "" if factor == 1 else f", writers scaled by 1/√(2N), N = {_WRITES}"
        claim = f"variance of the stream after {_WRITES} writes over that of its entry{scaled}"
        expected = theory.independent_growth([factor] * _WRITES, 1.0) ** 2
        source = "Xiong et al. 2020, lemma 2; Radford et al. 2019, sec. 2.3, with two writes counted a layer"
        measured = (stream.states[-1].std / stream.entry_rms) ** 2 if stream else math.nan
        note = f"growth exponent {stream.growth.exponent:.2f}" if stream else ""
        yield Claim(f"growth-{name}", _GROWTH, claim, expected, 0.05 * expected, source).judged(measured, note)


def _stream(model: nn.Module, width: int) -> StreamMeasure | None:
    """What the default probe measures of the model's stream on unit normal rows."""
    report = probe(model, torch.randn(_MANY, width))
    return next(iter(report.data.measurements.residual), None)
