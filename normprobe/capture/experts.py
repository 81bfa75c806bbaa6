"""Experts of a mixture on the meta device: routed by batched products, which read no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

META_EXPERTS = "batched_mm"


@contextmanager
def valueless_experts(model: nn.Module) -> Iterator[str | None]:
    """While open, a transformers model on the meta device runs its experts without reading how tokens were routed.

    Its other implementations ask which expert got which token, or want a half dtype. Yields what was set (None where
    nothing was: a model with values, or one that offers no choice); the choice is put back at the end.
    """
    choose, chosen = getattr(model, "set_experts_implementation", None), getattr(model, "config", None)
    before = getattr(chosen, "_experts_implementation", None)
    offered = getattr(model, "_can_set_experts_implementation", bool)()
    if before is None or choose is None or not offered or not any(p.is_meta for p in model.parameters()):
        yield None
        return
    choose(META_EXPERTS)
    try:
        yield META_EXPERTS
    finally:
        choose(before)
