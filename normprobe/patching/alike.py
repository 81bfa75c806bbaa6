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
from normprobe.errors import CheckpointError, RewriteError
from normprobe.patching.expressed import outputs_in_training, set_numbers, state_numbers
from normprobe.patching.matched import WITHOUT, Origins, Side, has_room, match
from normprobe.patching.options import room
from normprobe.patching.retyped import config_class, retyped
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites import Effect, Proof
from normprobe.rewrites.proof import Baseline
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
                if found.proof.max_abs == 0:
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
    return Alike(made, origins, _compared(ours, theirs, made, origins), dropped)


def _class_for(model: nn.Module, config: Any) -> type[Any]:
    """The class for the same task: what an automatic class that builds `model` builds for `config`."""
    import transformers

    own = set(type(model).__mro__)
    for name in sorted(each for each in dir(transformers) if each.startswith("AutoModel")):
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


def _compared(ours: Side, theirs: Side, made: nn.Module, origins: Origins) -> Proof:
    """Both on the same inputs.

    Raises:
        CheckpointError: the outputs differ by more than rounding explains, or not in training.
    """
    before = Baseline.of(ours.model, ours.inputs, Effect.EXACT, ours.survey.anatomy, room())
    what = f"{ours.called} is no {theirs.called}: every tensor has a place there, but the outputs differ"
    try:
        proof = before.compare(made, ours.inputs)
    except RewriteError as error:
        raise CheckpointError(what, expected=error.expected, found=error.found) from error
    if proof.holds:
        _check_training(ours, theirs, made, proof.tolerance or 0.0)
        return proof
    found = "; ".join((str(proof), *_differences(ours, theirs, origins)))
    raise CheckpointError(what, expected="the same outputs, within rounding", found=found, hint=WITHOUT)


def _differences(ours: Side, theirs: Side, origins: Origins) -> Iterator[str]:
    """What the data flow of the two says differently."""
    norms = [{n.weight: n for n in side.survey.anatomy.norms} for side in (ours, theirs)]
    for name, old in origins.items():
        a, b = norms[0].get(old), norms[1].get(name)
        if a is not None and b is not None and _norm(a) != _norm(b):
            yield f"{a.path}: {_norm(a)}; in {theirs.called} {_norm(b)}"
            break
    sites = (side.survey.anatomy.attention[:1] for side in (ours, theirs))
    for one, other in zip(*sites, strict=False):
        for field in ("heads", "kv_heads", "scale", "softcap", "causal", "window", "biased"):
            told = [getattr(site, field) for site in (one, other)]
            if told[0] != told[1]:
                yield f"{one.path}: {field} {told[0]}; in {theirs.called} {told[1]}"


def _check_training(ours: Side, theirs: Side, made: nn.Module, tolerance: float) -> None:
    """Frozen statistics and dropout show in training alone; nothing is said of a model that draws numbers there."""
    first, second, other = (
        outputs_in_training(model, ours.inputs, seed) for model, seed in ((ours.model, 0), (ours.model, 1), (made, 0))
    )
    drawn = any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    off = max((float((a - b).abs().max()) for a, b in zip(first, other, strict=True)), default=0.0)
    if not drawn and not off <= tolerance:
        what = f"{ours.called} is no {theirs.called}: in training the outputs differ, by dropout or batch statistics"
        raise CheckpointError(what, expected=f"max |Δ| <= {tolerance:.3g}", found=f"{off:.3g}", hint=WITHOUT)


def _norm(norm: NormSite) -> str:
    eps = "" if norm.eps is None else f", eps {norm.eps:.3g}"
    return f"{norm.kind}, {norm.affine}{eps}"
