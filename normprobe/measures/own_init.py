"""What a model's own class makes: a fresh instance with the same configuration, and the weights that it draws."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MOST = 100_000_000  # parameters of a model that is built anew
_UNBUILT = "its class cannot be built from its configuration"


def own_weights(model: nn.Module, seed: int) -> tuple[Mapping[str, Tensor], str]:
    """The parameters of a fresh instance on the processor, and why there are none.

    The class of a model of transformers takes its configuration and draws its own weights; other classes do not say
    what they were built with: none of these, and no reason. Random states are left as they were.

    Args:
        model: whose class is built anew.
        seed: of the weights.
    """
    if not _configured(model):
        return {}, ""
    if sum(p.numel() for p in model.parameters()) > MOST:
        return {}, f"it was not built anew to compare, as it has more than {MOST:,} parameters"
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        try:
            return dict(_built(model).named_parameters()), ""
        except Exception as error:  # whatever a foreign constructor raises that wants more than its configuration
            return {}, f"{_UNBUILT}: {type(error).__name__}: {error}"


def own_structure(model: nn.Module) -> tuple[nn.Module | None, str]:
    """A fresh instance on the meta device, which holds no values, and why there is none."""
    if not _configured(model):
        return None, ""
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        try:
            return _built(model), ""
        except Exception as error:  # whatever a foreign constructor raises that wants values, or more than a config
            return None, f"{_UNBUILT}: {type(error).__name__}: {error}"


def _configured(model: nn.Module) -> bool:
    """Whether the class of a model is built from its configuration alone: those of transformers are."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _built(model: Any) -> nn.Module:
    fresh: nn.Module = type(model)(copy.deepcopy(model.config))
    return fresh
