"""Run a model in the dtypes that it is stored in, and make what can be trained, whatever torch is set to outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps")


@contextmanager
def as_stored() -> Iterator[None]:
    """While open automatic mixed precision is off, also for who asks, and so is inference mode; afterwards both are as
    before, and mixed precision has forgotten the weights that it cast: torch casts each once, and would not see that
    it was changed since.

    Mixed precision hides which weight a product reads behind a cast, and its casts are no rounding of the model's own.
    Parameters that are made in inference mode could never be trained.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in _DEVICES:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            torch.clear_autocast_cache()
