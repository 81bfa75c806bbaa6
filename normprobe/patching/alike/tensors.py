"""Which tensor of one model goes where in another that computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from torch import Tensor, nn

from normprobe.capture.experts import valueless_experts
from normprobe.capture.invoke import Inputs
from normprobe.checkpoints.names import listed
from normprobe.errors import CheckpointError
from normprobe.patching.alike.places import Place, is_bias, places
from normprobe.rewrites.base import Survey

WITHOUT = "without --as it is written as what it is, with code where it needs some"
Origins = Mapping[str, str | None]  # for each tensor of the one model that of the other which it is; None: zeros


@final
@dataclass(frozen=True)
class Side:
    """A model with what is known of it.

    Attributes:
        model: may be on the meta device.
        inputs: of one forward.
        called: in messages.
    """

    model: nn.Module
    inputs: Inputs
    called: str

    @cached_property
    def survey(self) -> Survey:
        """What one forward says of it."""
        with valueless_experts(self.model):
            return Survey.of(self.model, self.inputs)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where its parameters are."""
        return places(self.survey)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Its parameters and what it saves besides; a tensor that it holds by several names by the first of them."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    def shown(self, names: list[str]) -> str:
        """Tensors with their shapes."""
        return listed(tuple(f"{name} {tuple(self.tensors[name].shape)}" for name in names))


def match(ours: Side, theirs: Side) -> Origins:
    """For each tensor of `theirs` that of `ours` which belongs there: the one of the same name and shape, else the one
    of the same shape in the same place. A bias that one of them lacks is 0 in the other.

    Raises:
        CheckpointError: tensors are left over, or it is not clear which of several is meant.
    """
    found: dict[str, str | None] = {
        name: name
        for name, tensor in theirs.tensors.items()
        if name in ours.tensors and ours.tensors[name].shape == tensor.shape
    }
    if len(found) < len(theirs.tensors) or len(found) < len(ours.tensors):
        found |= _by_place(ours, theirs, found)
        _settle(ours, theirs, found)
    return found


def has_room(theirs: Side, ours: Side) -> bool:
    """Whether `theirs` has as many tensors of each shape as `ours`, zeros not counted."""
    need = Counter(tuple(tensor.shape) for tensor in ours.tensors.values() if tensor.dim() > 1 or bool(tensor.any()))
    return need <= Counter(tuple(tensor.shape) for tensor in theirs.tensors.values())


def _by_place(ours: Side, theirs: Side, found: Origins) -> dict[str, str | None]:
    left = _at_places(theirs, theirs.tensors.keys() - found.keys())
    free = _at_places(ours, ours.tensors.keys() - set(found.values()))
    return {left[at][0]: free[at][0] for at in left.keys() & free.keys() if len(left[at]) == len(free[at]) == 1}


def _at_places(side: Side, names: set[str]) -> dict[tuple[Place, tuple[int, ...]], list[str]]:
    found: dict[tuple[Place, tuple[int, ...]], list[str]] = {}
    for name in names:
        if name in side.places:
            found.setdefault((side.places[name], tuple(side.tensors[name].shape)), []).append(name)
    return found


def _settle(ours: Side, theirs: Side, found: dict[str, str | None]) -> None:
    """Biases that one side lacks; nothing else may be left."""
    missing = [name for name in theirs.tensors if name not in found]
    found |= {name: None for name in missing if is_bias(theirs.places.get(name, frozenset()))}
    missing = [name for name in missing if name not in found]
    used = set(found.values())
    over = [name for name in ours.tensors if name not in used and not _is_no_bias(ours, name)]
    if not missing and not over:
        return
    told = [f"{theirs.called} has {theirs.shown(missing)}" if missing else ""]
    told += [f"{ours.called} has {ours.shown(over)}" if over else ""]
    raise CheckpointError(
        f"{ours.called} is no {theirs.called}: not every tensor of the one has a place in the other",
        expected="the same tensors by name and shape, or by shape and place in the data flow",
        found="; ".join(filter(None, told)),
        hint=WITHOUT,
    )


def _is_no_bias(side: Side, name: str) -> bool:
    """Whether this is a bias of zeros."""
    return is_bias(side.places.get(name, frozenset())) and not bool(side.tensors[name].any())
