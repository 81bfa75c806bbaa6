"""Run a model in the dtypes that it is stored in, also where automatic mixed precision is on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps")


@contextmanager
def as_stored() -> Iterator[None]:
    """While open automatic mixed precision is off, also for who asks; afterwards it is as before, and has forgotten the
    weights that it cast: torch casts each once, and would not see that it was changed since.

    Mixed precision hides which weight a product reads behind a cast, and its casts are no rounding of the model's own.
    """
    with ExitStack() as stack:
        for kind in _DEVICES:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            torch.clear_autocast_cache()
