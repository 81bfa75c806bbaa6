"""Whether a model drops elements in train mode, seen by running it there."""

from __future__ import annotations

import torch

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import invoke
from normprobe.measures.main_output import main_output
from normprobe.rewrites.base import Survey

_DROPS = (
    "the model has dropout, or draws at random otherwise, in train mode: what that leaves of a write has a mean, which "
    "LayerNorm would subtract; exact in eval mode"
)


def dropout_note(survey: Survey) -> str | None:
    """What has to be said of train mode, where two forwards give different outputs; None where they give the same."""
    if any(p.is_meta for p in survey.model.parameters()):
        return "exact in eval mode; whether train mode has dropout cannot be seen without weights"
    try:
        return _DROPS if _random(survey) else None
    except Exception as error:  # a foreign model may refuse train mode in any way; the reason is shown
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        return (
            f"exact in eval mode; whether train mode has dropout cannot be seen, since it does not run there ({told})"
        )


def _random(survey: Survey) -> bool:
    with untouched(survey.model) as keeper, torch.no_grad():
        survey.model.train()
        with keeper.mode():
            found = [main_output(invoke(survey.model, survey.inputs)) for _ in range(2)]
    one, other = (None if each is None else each.double() for each in found)
    if one is None or other is None:
        return False
    return one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=0.0, equal_nan=True)
