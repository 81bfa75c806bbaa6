"""A model that computes what another architecture computes becomes that one, if its outputs say so too."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.invoke import Inputs
from normprobe.errors import CheckpointError
from normprobe.patching.alike.configuration import config_class, retyped
from normprobe.patching.alike.outputs import compared
from normprobe.patching.alike.tensors import Origins, Side, has_room, match
from normprobe.patching.expressed import set_numbers, state_numbers
from normprobe.records import Anatomy
from normprobe.rewrites import Proof
from normprobe.structure.automatic import automatic
from normprobe.structure.modelling import base_of
from normprobe.structure.restore import main_dtype
from normprobe.targets.heads import model_class
from normprobe.targets.quiet import quiet


@dataclass(frozen=True)
class Alike:
    """A model of another architecture.

    Attributes:
        model: it, in eval mode; its tensors share memory with those of the model that it was made from.
        origins: for each of its tensors the one of that model; None for a bias of zeros.
        proof: its outputs beside those of that model.
        dropped: fields of that model's configuration that it has no place for.
    """

    model: Any
    origins: Origins
    proof: Proof
    dropped: dict[str, Any]


def alike(model: Any, model_type: str, inputs: Inputs, numbers: Mapping[float, float]) -> Alike:
    """`model` as one of `model_type`: its configuration and its tensors in the places that they have there.

    Args:
        model: with what was changed in it.
        model_type: as configurations of transformers name it.
        inputs: of one forward; both models have to give the same outputs for them.
        numbers: what numbers that modules held have become; the configuration may hold them as they were.

    Raises:
        SettingError: there is no such architecture.
        CheckpointError: it has no place for some of the tensors, or computes something else.
    """
    own = model.config.model_type
    ours = Side(model, inputs, f"the rewritten {own}" if own == model_type else own)
    config, dropped = retyped(model.config, config_class(model_type), ours.survey.anatomy)
    set_numbers(config, numbers)
    kind = _class_for(model, config)
    try:
        return _as_configured(ours, kind, config, dropped)
    except CheckpointError:
        for other in _switched(ours, kind, config):
            with suppress(CheckpointError):
                return _as_configured(ours, kind, other, dropped)
        raise


def switched(model: Any, inputs: Inputs, numbers: Mapping[float, float]) -> Alike | None:
    """`model` as its own architecture with one switch of its configuration turned, such as one that adds norms.

    Args:
        model, inputs, numbers: as of `alike`.

    Returns:
        None where its configuration has a place for all tensors as it is, or where no switch gives its very outputs.
    """
    ours, kind = Side(model, inputs, model.config.model_type), base_of(model)
    config, _ = retyped(model.config, type(model.config), Anatomy())
    state_numbers(kind, config, model, numbers)
    if not has_room(Side(_empty(kind, config, model), inputs, ""), ours):
        for other in _switched(ours, kind, config):
            with suppress(CheckpointError):
                found = _as_configured(ours, kind, other, {})
                if found.proof.max_abs == 0 and not found.proof.choices_given:
                    return found
    return None


def _switched(ours: Side, kind: type[Any], config: Any) -> Iterator[Any]:
    """The configuration with one of its switches turned, each with which there is a place for every tensor."""
    from transformers import PreTrainedConfig

    usual = vars(PreTrainedConfig())
    for name in [name for name, value in vars(config).items() if type(value) is bool and name not in usual]:
        other = copy.deepcopy(config)
        setattr(other, name, not getattr(config, name))
        with suppress(CheckpointError):
            if has_room(Side(_empty(kind, other, ours.model), ours.inputs, ""), ours):
                yield other


def _as_configured(ours: Side, kind: type[Any], config: Any, dropped: dict[str, Any]) -> Alike:
    theirs = Side(_empty(kind, config, ours.model), ours.inputs, config.model_type)
    origins = match(ours, theirs)
    made = _filled(kind, config, ours, theirs, origins)
    return Alike(made, origins, compared(ours, theirs, made, origins), dropped)


def _class_for(model: nn.Module, config: Any) -> type[Any]:
    """The class for the same task: what an automatic class that builds `model` builds for `config`."""
    import transformers

    own = set(type(model).__mro__)
    for name in automatic():
        mapping = getattr(getattr(transformers, name), "_model_mapping", {})
        chosen = [mapping.get(type(each), None) for each in (model.config, config)]
        had, has = (each if isinstance(each, tuple | list) else (each,) for each in chosen)
        if own & set(had) and has[0] is not None:
            found: type[Any] = has[0]
            return found
    return model_class(config)


def _empty(kind: type[Any], config: Any, like: nn.Module) -> nn.Module:
    """A model without values."""
    try:
        with quiet(), torch.device("meta"):
            made: nn.Module = kind(config)
    except Exception as error:  # the code of the class raises what it likes; the reason is shown
        what = f"no {kind.__name__} can be built from the configuration of {type(like).__name__}"
        raise CheckpointError(what, found=f"{type(error).__name__}: {error}") from error
    return made.to(main_dtype(like)).eval()


def _filled(kind: type[Any], config: Any, ours: Side, theirs: Side, origins: Origins) -> Any:
    """The model with the tensors of `ours` in their places."""
    dtype = main_dtype(ours.model)
    state: dict[str, Tensor] = {
        name: torch.zeros(theirs.tensors[name].shape, dtype=dtype) if old is None else ours.tensors[old].detach()
        for name, old in origins.items()
    }
    with quiet():
        made, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    lost = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if lost:
        raise CheckpointError(f"{kind.__name__} does not take the tensors of {ours.called}", found=str(lost[0]))
    made.config.architectures = [kind.__name__]
    return made.eval()
