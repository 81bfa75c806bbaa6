"""Where the configuration of an architecture can say what a rewrite changed, no code has to come along."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.outputs import named_tensors
from normprobe.structure.modelling import base_of
from normprobe.structure.restore import main_dtype
from normprobe.structure.snapshot import Structure
from normprobe.targets.quiet import quiet


def expressed(
    model: Any, before: Structure, changes: Sequence[Mapping[str, Any]], inputs: Inputs
) -> tuple[str, ...] | None:
    """Change `model.config` so that a model built from it is what `model` has become.

    Fields that hold a number which a module held, and holds no longer, are given the number that it holds now; what is
    built so has to give the very outputs of `model`.

    Returns:
        The fields that changed, dotted; None where no fields say it, and then the configuration is as it was.
    """
    pairs = numbers_of(before, changes)
    if pairs is None:
        return None
    config = copy.deepcopy(model.config)
    fields = [*set_numbers(config, pairs)]
    if not fields or not same_outputs(_built(model, config), model, inputs):
        return None
    model.config = config
    return tuple(fields)


def numbers_of(before: Structure, changes: Sequence[Mapping[str, Any]]) -> dict[float, float] | None:
    """The number that each number became; None where something else than numbers changed, or one became two."""
    found: dict[float, float] = {}
    for change in changes:
        if change.keys() != {"path", "values"}:
            return None
        for name, value in change["values"].items():
            had = before.parts[change["path"]].values.get(name)
            if type(had) is not float or type(value) is not float or found.setdefault(had, value) != value:
                return None
    return found


def set_numbers(config: Any, pairs: Mapping[float, float], at: str = "") -> Iterator[str]:
    """Change the fields of a configuration and of those inside it, and give their names."""
    for name, value in vars(config).items():
        if type(value) is float and value in pairs:
            setattr(config, name, pairs[value])
            yield at + name
        elif hasattr(value, "to_diff_dict"):
            yield from set_numbers(value, pairs, f"{at}{name}.")


def _built(model: Any, config: Any) -> nn.Module:
    """A model of `config` that shares the weights of `model`."""
    with quiet():
        made: nn.Module = base_of(model).from_pretrained(
            None, config=config, state_dict=model.state_dict(), dtype=main_dtype(model), local_files_only=True
        )
    return made.eval()


def same_model(loaded: nn.Module, model: nn.Module, inputs: Inputs) -> bool:
    """Whether `loaded` holds the very values of `model`, and gives the same outputs with them, bit for bit.

    It shares the memory of `model` afterwards: in memory that is aligned otherwise kernels sum in another order.
    """
    ours, theirs = (each.state_dict(keep_vars=True) for each in (loaded, model))
    if ours.keys() != theirs.keys():
        return False
    for name, tensor in ours.items():
        if tensor.dtype is not theirs[name].dtype or not _alike(tensor, theirs[name]):
            return False
        tensor.data = theirs[name].data
    return same_outputs(loaded, model, inputs)


def same_outputs(a: nn.Module, b: nn.Module, inputs: Inputs) -> bool:
    """Whether two models give the same floating numbers, bit for bit."""
    of_a, of_b = _outputs(a, inputs), _outputs(b, inputs)
    return len(of_a) == len(of_b) and all(map(_alike, of_a, of_b))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or (
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    )  # equal but for NaN


def _outputs(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    with untouched(model) as keeper, torch.no_grad(), keeper.mode():
        return [tensor for _, tensor in named_tensors(invoke(model, inputs)) if tensor.is_floating_point()]
