"""Parameter groups that spare norms, biases and scales from weight decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normprobe.anatomy.weights.added import added_parameters
from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.inputs import or_made
from normprobe.optimising.numbers import check_number
from normprobe.records.parts import whole
from normprobe.rewrites.base import Survey


def decay_groups(model: nn.Module, weight_decay: float, inputs: Inputs | None = None) -> list[dict[str, Any]]:
    """Two groups for a torch optimiser: weights with decay, and what decay would harm without it.

    Weights are what the recorded forward multiplies the signal by, and tables that it looks up. Gains and offsets of
    norms, biases and all else that is only added to the signal (a table of positions), factors on branches and other
    vectors are spared, whatever they are called and whatever their shape: decay pulls a gain to 0 and
    with it the signal, and a bias bounds nothing (Loshchilov & Hutter 2019, sec. 2; He et al. 2019, Bag of Tricks,
    sec. 3.1). A parameter that the forward did not use counts as a weight where it has two axes of more than one
    element.

    Args:
        model: left as it is.
        weight_decay: of the first group.
        inputs: of one forward, as for `normprobe.probe`; None where the model's config says enough.

    Returns:
        [{"params", "weight_decay", "names"}, …] in the order of the parameters, frozen ones left out; groups without
        parameters are left out too.

    Raises:
        SettingError: `model` is no module, or `weight_decay` is negative or not finite.
        InputError: no inputs could be made, or the model rejected them.
    """
    check_model(model)
    check_number("weight decay", weight_decay, zero=True)
    survey = Survey.of(model, or_made(model, inputs))
    spared, added = _spared(survey), added_parameters(survey.trace)
    names = {name for name, _ in model.named_parameters()}
    weights = {whole(site.parameter, names) for site in survey.anatomy.weights}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights |= {name for name, p in named if _matrix(p) and name not in added}
    decayed = {name for name, _ in named if name in weights and name not in spared}
    groups = [
        {
            "params": [p for name, p in named if (name in decayed) is decays],
            "weight_decay": weight_decay if decays else 0.0,
            "names": [name for name, p in named if (name in decayed) is decays],
        }
        for decays in (True, False)
    ]
    return [group for group in groups if group["params"]]


def _spared(survey: Survey) -> set[str]:
    """Gains and offsets of norms, and learned factors on branches and on attention."""
    anatomy = survey.anatomy
    branches = (branch for stream in anatomy.streams for branch in stream.branches)
    names = [
        *(name for norm in anatomy.norms for name in (norm.weight, norm.bias)),
        *(branch.branch_scale.parameter for branch in branches),
        *(site.scale_parameter for site in anatomy.attention),
    ]
    held = {name for name, _ in survey.model.named_parameters()}
    return {whole(name, held) for name in names if name is not None}


def _matrix(parameter: Tensor) -> bool:
    return sum(length > 1 for length in parameter.shape) > 1
