"""What a model's own class draws: the weights of a fresh instance with the same configuration."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MOST = 100_000_000  # parameters of a model that is built anew


def own_weights(model: nn.Module, seed: int) -> tuple[Mapping[str, Tensor], str]:
    """The parameters of a fresh instance on the processor, and why there are none.

    The class of a model of transformers takes its configuration and draws its own weights; other classes do not say
    what they were built with: none of these, and no reason. Random states are left as they were.

    Args:
        model: whose class is built anew.
        seed: of the weights.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}, ""
    if sum(p.numel() for p in model.parameters()) > MOST:
        return {}, f"it was not built anew to compare, as it has more than {MOST:,} parameters"
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        try:
            fresh = type(model)(copy.deepcopy(model.config))
        except Exception as error:  # whatever a foreign constructor raises that wants more than its configuration
            return {}, f"its class cannot be built from its configuration: {type(error).__name__}: {error}"
    return dict(fresh.named_parameters()), ""
