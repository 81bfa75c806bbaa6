"""Parameter groups and initial scales of the maximal update parametrisation, muP (Yang et al. 2022, table 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normprobe import stats
from normprobe.capture.invoke import Inputs
from normprobe.errors import SettingError
from normprobe.inputs import inputs_from_config
from normprobe.sweeping.roles import Place, by_role, places

_FIXED_LR = frozenset({"input", "fixed", "shared", "unknown"})


def parameter_groups(
    model: nn.Module, lr: float, base: nn.Module, inputs: Inputs | None = None, base_inputs: Inputs | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for Adam or AdamW under which the learning rate tuned at the width of `base` serves `model`.

    Hidden and readout matrices get lr / (fan-in / fan-in of the base); embeddings, gains and biases get lr (Yang et
    al. 2022, table 3, Adam). Weight decay that is multiplied by the rate, as in AdamW, should be divided by the same
    ratio to stay as it is. Initial values are not touched: `initial_factors` says what muP asks of them. The logits
    of a readout that shares the embedding's weight (role "shared") should be multiplied by 1/ratio. Attention
    whose heads grow should scale by 1/head_dim in place of its root (definition 4.1).

    Args:
        model: left as it is.
        lr: the rate at the width of the base.
        base: the same model at another width; its values do not matter.
        inputs: of one forward of `model`, which tells readouts from embeddings; None where its configuration says
            enough.
        base_inputs: of one forward of the base; the same where left out.

    Returns:
        Groups for `torch.optim.Adam(groups)`: beside `params` and `lr` each has `role`, `ratio` and the parameters'
        `names`.

    Raises:
        SettingError: `lr` is not positive; the base is another model or has the same width.
        InputError: no inputs were given, and the configuration says too little to make some.
    """
    if not lr > 0:
        raise SettingError("the learning rate is not positive", expected="lr > 0", found=repr(lr))
    if inputs is None:
        inputs, _ = inputs_from_config(model, tokens=8)
    found = places(model, base, inputs, inputs if base_inputs is None else base_inputs)
    return groups(model, found, lr)


def groups(model: nn.Module, found: Mapping[str, Place], lr: float) -> list[dict[str, Any]]:
    """The groups of parameters in these places."""
    own = dict(model.named_parameters())
    return [
        {
            "params": [own[name] for name in names],
            "lr": lr if place.role in _FIXED_LR else lr / place.ratio,
            "role": place.role,
            "ratio": place.ratio,
            "names": names,
        }
        for place, names in by_role(found)
    ]


def initial_factors(model: nn.Module, base: nn.Module, found: Mapping[str, Place]) -> dict[str, float]:
    """Factors on the initial values of `model` that make its parametrisation muP's, from those of a drawn base.

    The RMS of a hidden matrix should be that of the base over √ratio, of a readout that of the base over the ratio, of
    all else that of the base (Yang et al. 2022, table 3). What is 0 stays 0.
    """
    theirs = dict(base.named_parameters())
    powers = {"hidden": 0.5, "readout": 1.0}
    factors = {}
    for name, parameter in model.named_parameters():
        place, mine = found[name], _rms(parameter)
        if place.role not in ("unknown", "fixed") and mine > 0:
            factors[name] = _rms(theirs[name]) / place.ratio ** powers.get(place.role, 0.0) / mine
    return factors


def rescale(model: nn.Module, factors: Mapping[str, float]) -> None:
    """Multiply parameters in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in factors:
                parameter.mul_(factors[name])


def _rms(tensor: Tensor) -> float:
    return float(stats.token_rms(tensor.flatten())) if tensor.numel() else 0.0
