"""Which of the tensors that a model returns is what it computes, rather than a loss or a state beside it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normprobe.capture.outputs import named_tensors


def main_output(output: Any) -> Tensor | None:
    """The logits by that name, else the first floating tensor that has an axis; None where there is none.

    A scalar is a loss, which stands first where the inputs hold labels.
    """
    found = [(name, t) for name, t in named_tensors(output) if t.is_floating_point() and t.dim()]
    return dict(found).get("logits", found[0][1] if found else None)
