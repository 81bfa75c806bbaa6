"""What the compared output of a model hangs on, for the inputs at hand.

Where two models give the same output although they hold other values, either both are forms of one function, or the
inputs do not show what differs: rows of an embedding that are not looked up, positions that are not reached, experts
that are not chosen, a branch behind a weight of zeros. A gradient tells the two apart, as it is exactly 0 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from normprobe.capture.watch import watch
from normprobe.diffing.settings import in_setting, settings
from normprobe.diffing.signal import Side, floating_outputs
from normprobe.measures.chains import differentiable
from normprobe.measures.stand_ins import UndifferentiableError, differentiated, stand_ins
from normprobe.records import Anatomy


class Reach:
    """Gradients of the first floating tensor that a model returns, by every name of its parameters.

    Args:
        gradients: of a sum of all elements of that tensor with random weights.
        anatomy: of the model.
    """

    def __init__(self, gradients: Mapping[str, Tensor], anatomy: Anatomy) -> None:
        self.gradients = gradients
        self._queries = {site.path: [rows.parameter for rows in site.columns.values()] for site in anatomy.attention}

    def part(self, path: str) -> bool:
        """Whether the output hangs on the part at `path`: on the weights of queries, keys and values of an attention
        site, else on those inside the module. True where it has none that could tell."""
        module = path.partition("#")[0]
        held = [name for name in self.gradients if module in ("", ".") or name.startswith(f"{module}.")]
        names = [name for name in self._queries.get(path, ()) if name in self.gradients] or held
        return not names or any(bool(self.gradients[name].any()) for name in names)


def reach(a: Side, b: nn.Module, seed: int) -> Reach | str:
    """The gradients of A in the dtype in which both models are compared, from one forward and one backward.

    Args:
        a: the model with its inputs.
        b: what it is compared with.
        seed: of the random weights.

    Returns:
        The reason where autograd cannot differentiate the model.
    """
    reason = differentiable(a.model) or ""
    for setting in () if reason else settings(a.model, b):
        try:
            with in_setting(a.model, a.inputs, setting, None) as inputs, stand_ins(a.model) as leaves:
                return Reach(dict(_gradients(a.model, inputs, leaves, seed)), a.anatomy)
        except UndifferentiableError as error:
            reason = reason or str(error)
    return reason


def _gradients(
    model: nn.Module, inputs: object, leaves: Mapping[str, Tensor], seed: int
) -> Iterator[tuple[str, Tensor]]:
    with differentiated("model"):
        output = floating_outputs(watch(model, inputs, {}, grad=True).output)[0][1]  # type: ignore[arg-type]
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        with torch.enable_grad():
            value = (output.to(torch.promote_types(output.dtype, torch.float32)) * weights.to(output.device)).sum()
        names = list(leaves)
        found: Sequence[Tensor | None] = torch.autograd.grad(value, [leaves[n] for n in names], allow_unused=True)
    for name, gradient in zip(names, found, strict=True):
        if gradient is None:
            yield name, torch.zeros((), device=leaves[name].device).expand(leaves[name].shape)
        else:
            yield name, gradient.to_dense() if gradient.layout is not torch.strided else gradient
