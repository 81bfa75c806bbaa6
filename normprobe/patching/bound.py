"""Which parameter of a model each tensor of a checkpoint is: told by the memory that they share, not by names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

_Key = tuple[int, tuple[int, ...], str]


def bound(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name of a parameter or buffer of the model the name in the checkpoint that it was mapped from.

    A tensor of the checkpoint that was converted on its way in (cast, merged with others) is left out.
    """
    stored = {key_of(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    state = model.state_dict(keep_vars=True)
    return {name: stored[key] for name, tensor in state.items() if (key := key_of(tensor)) in stored}


def key_of(tensor: Tensor) -> _Key:
    """Where a tensor lies, and as what."""
    return tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype)
