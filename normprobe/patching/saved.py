"""What a checkpoint of a model holds, taken apart one converted parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.modes import DispatchMode
from normprobe.checkpoints.opened import Opened
from normprobe.errors import CheckpointError
from normprobe.patching.bound import key_of


@dataclass(frozen=True)
class Part:
    """Tensors of a checkpoint that come of the same parameters.

    Attributes:
        model: what it is a part of.
        own: those parameters or buffers, by their names in the model.
        stored: the tensors by their names in the checkpoint, without values.
    """

    model: nn.Module
    own: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Those of `stored` with their values; what was merged on its way in takes memory of its own."""
        with torch.no_grad():
            found = _taken_apart(self.model, self.own)
        wanted, had = ([(tensor.shape, tensor.dtype) for tensor in each.values()] for each in (self.stored, found))
        if wanted != had:
            what = f"{', '.join(self.own)}: taken apart into other tensors than beside the rest of the model"
            raise CheckpointError(what, expected=", ".join(self.stored), found=", ".join(found))
        return dict(zip(self.stored, found.values(), strict=True))


def saved(model: nn.Module, source: Opened, prefix: str) -> tuple[Part, ...]:
    """What a checkpoint of `model` holds, by the names and in the form that the checkpoint had: tied tensors by as many
    names as it has there, one if by none, and what was merged on its way in taken apart.

    Args:
        model: the model.
        source: its checkpoint.
        prefix: what names of the model have before those of the checkpoint.
    """
    state = _kept(model, source, prefix)
    bare = {name: torch.empty_like(tensor, device="meta", requires_grad=False) for name, tensor in state.items()}
    with torch.no_grad(), _Lineage(bare) as lineage:
        found = _taken_apart(model, bare)
    parts: dict[frozenset[str], dict[str, Tensor]] = {}
    for name, whole in _together({name: lineage.of(tensor) for name, tensor in found.items()}).items():
        parts.setdefault(whole, {})[name.removeprefix(prefix)] = found[name]
    return tuple(Part(model, {n: state[n] for n in state if n in own}, stored) for own, stored in parts.items())


def _kept(model: nn.Module, source: Opened, prefix: str) -> dict[str, Tensor]:
    """The state of the model without names for tensors that have another in the checkpoint."""
    state = model.state_dict(keep_vars=True)
    in_source = {name for name in state if name.removeprefix(prefix) in source.tensors}
    named = {key_of(state[name]) for name in in_source}
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key = key_of(tensor)
        if name in in_source or not tensor.numel() or key not in named:
            kept[name] = tensor
            named.add(key)
    return kept


def _taken_apart(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return found


def _together(lineage: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """For each tensor of a checkpoint all names of the model that it has a part in, directly or by other tensors."""
    groups: dict[str, set[str]] = {}
    for names in lineage.values():
        whole = set(names).union(*(groups[name] for name in names if name in groups))
        groups.update(dict.fromkeys(whole, whole))
    return {name: frozenset(groups[next(iter(names))]) for name, names in lineage.items()}


class _Lineage(DispatchMode):
    """Of which of some tensors each tensor is made."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # the number of a storage that is gone would go to another
        for name, tensor in named.items():
            self._add(tensor, {name})

    def of(self, tensor: Tensor) -> frozenset[str]:
        """Their names."""
        return frozenset(self._names.get(tensor.untyped_storage()._cdata, ()))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        made = func(*args, **(kwargs or {}))
        read, written = (
            [t for t in pytree.tree_leaves(each) if isinstance(t, Tensor)] for each in ((args, kwargs), made)
        )
        names = set[str]().union(*map(self.of, read))
        for tensor in written:
            self._add(tensor, names)
        return made

    def _add(self, tensor: Tensor, names: set[str]) -> None:
        storage = tensor.untyped_storage()
        self._names.setdefault(storage._cdata, set()).update(names)
        self._alive.append(storage)
