"""Parameter groups of the maximal update parametrisation, muP (Yang et al. 2022, tables 3 and 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.errors import SettingError
from normprobe.inputs import inputs_from_config, or_made
from normprobe.optimising.numbers import check_number
from normprobe.records.sweep import Optimizer
from normprobe.rewrites.base import Survey
from normprobe.rewrites.mup import Place, carried
from normprobe.sweeping.roles import by_role, places


def parameter_groups(
    model: nn.Module,
    lr: float,
    base: nn.Module | None = None,
    inputs: Inputs | None = None,
    base_inputs: Inputs | None = None,
    *,
    optimizer: Optimizer | Literal["adamw"] = "adam",
) -> list[dict[str, Any]]:
    """Parameter groups under which the learning rate tuned at the base width serves `model`.

    With Adam hidden and readout matrices get lr / (fan-in / fan-in of the base), embeddings, gains and biases lr; with
    SGD hidden matrices get lr, readouts lr / (fan-in / that of the base), embeddings, gains and biases lr times fan-out
    over that of the base (Yang et al. 2022, table 3). A readout that the model multiplies by base width / width, as
    `MuP` has it, gets lr with Adam and lr times fan-in over that of the base with SGD (table 8).

    A model that `MuP` rewrote tells the width of its base by itself. For another one, give the base; its initial values
    are not touched here: hidden weights should have std ∝ 1 / √fan-in, readouts ∝ 1 / fan-in, all others the base's.
    The logits of a readout that shares the embedding's weight (role "shared") should then be multiplied by 1 / ratio,
    and attention whose heads grow should scale by 1 / head_dim in place of its root (definition 4.1). Weight decay
    that is multiplied by the rate, as in AdamW, should be divided by what the rate is divided by to stay as it is.

    Args:
        model: left as it is.
        lr: the rate at the width of the base.
        base: the same model at another width, whose values do not matter; None for a model that `MuP` rewrote.
        inputs: of one forward of `model`, which tells readouts from embeddings; None where its configuration says
            enough.
        base_inputs: of one forward of the base; the same where left out.
        optimizer: adam, adamw (the same rates) or sgd, in any case.

    Returns:
        Groups for the optimiser: beside `params` and `lr` each has `role`, `ratio` and the parameters' `names`.

    Raises:
        SettingError: `lr` is not positive; the optimiser is unknown; the base is another model, has the same width, or
            is given for a model that `MuP` rewrote, or is missing for another one.
        InputError: no inputs were given, and the configuration says too little to make some; or a model rejected them.
    """
    check_model(model)
    check_number("learning rate", lr)
    named = named_optimizer(optimizer)
    inputs = inputs_from_config(model, tokens=8)[0] if inputs is None else or_made(model, inputs)
    if base is None:
        return groups(model, carried_places(model, inputs), lr, named)
    if carried(model) is not None:
        raise SettingError(
            "a base was given for a model that knows its own", expected="no base", found="a model that MuP rewrote"
        )
    check_model(base)
    of_base = inputs if base_inputs is None else or_made(base, base_inputs)
    return groups(model, places(model, base, inputs, of_base), lr, named)


def named_optimizer(optimizer: object) -> Optimizer:
    """The optimiser of table 3 that a name means, in any case; AdamW has the rates of Adam.

    Raises:
        SettingError: it has none of this name.
    """
    known: dict[str, Optimizer] = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}
    if not isinstance(optimizer, str) or optimizer.lower() not in known:
        raise SettingError("unknown optimizer", expected=" | ".join(known), found=repr(optimizer))
    return known[optimizer.lower()]


def carried_places(model: nn.Module, inputs: Inputs) -> dict[str, Place]:
    """The place of every parameter of a model that `MuP` rewrote.

    Raises:
        SettingError: it was not.
    """
    rewrite = carried(model)
    if rewrite is None:
        raise SettingError(
            "the width of the base is not known",
            expected="base: the same model at another width, or a model that MuP rewrote",
            found=type(model).__name__,
            hint="normprobe.rewrite(model, [normprobe.MuP(base_width=256)], inputs)",
        )
    return rewrite.places(Survey.of(model, inputs))


def groups(model: nn.Module, found: Mapping[str, Place], lr: float, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of parameters in these places."""
    own = dict(model.named_parameters())
    return [
        {
            "params": [own[name] for name in names],
            "lr": lr * place.rate(optimizer),
            "role": place.role,
            "ratio": place.ratio,
            "names": names,
        }
        for place, names in by_role(found)
    ]
