"""Whether two models hold and give the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.outputs import named_tensors
from normprobe.patching.bound import key_of


def same_model(
    loaded: nn.Module, model: nn.Module, inputs: Inputs, outputs: Sequence[torch.Tensor] | None = None
) -> bool:
    """Whether `loaded` holds the very values of `model`, and gives the same outputs with them, bit for bit.

    The floating `outputs` that `model` gave before are taken for its own where they are known.

    It shares the memory of `model` afterwards: in memory that is aligned otherwise kernels sum in another order.
    """
    ours, theirs = (each.state_dict(keep_vars=True) for each in (loaded, model))
    if ours.keys() != theirs.keys():
        return False
    for name, tensor in ours.items():
        if key_of(tensor) == key_of(theirs[name]):
            continue  # one memory
        if tensor.dtype is not theirs[name].dtype or not _alike(tensor, theirs[name]):
            return False
        tensor.data = theirs[name].data
    found = _outputs(loaded, inputs)
    return (outputs is not None and _all_alike(found, outputs)) or _all_alike(found, _outputs(model, inputs))


def same_outputs(a: nn.Module, b: nn.Module, inputs: Inputs) -> bool:
    """Whether two models give the same floating numbers, bit for bit."""
    return _all_alike(_outputs(a, inputs), _outputs(b, inputs))


def _all_alike(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(_alike, a, b))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all numbers are equal, NaN in the same places."""
    if torch.equal(a, b) or a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(_without_nan(a), _without_nan(b))


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.masked_fill(tensor.isnan(), 0)


def outputs_in_training(model: nn.Module, inputs: Inputs, seed: int) -> list[torch.Tensor]:
    """What a model gives in training mode, which it is not left in."""
    return _outputs(model, inputs, seed)


def _outputs(model: nn.Module, inputs: Inputs, training: int | None = None) -> list[torch.Tensor]:
    with untouched(model) as keeper, torch.no_grad(), keeper.mode():
        if training is not None:
            model.train()
            torch.manual_seed(training)
        return [tensor for _, tensor in named_tensors(invoke(model, inputs)) if tensor.is_floating_point()]
