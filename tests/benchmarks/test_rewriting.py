"""What the table of rewrites is made with leaves a model as it was."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.rewriting import outputs, snapshot


class Rescaling(nn.Module):
    """Halves its weights at the first forward in eval mode, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.rescaled = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not self.rescaled:
            with torch.no_grad():
                self.read.weight.div_(2)
            self.rescaled = True
        found: Tensor = self.read(x)
        return found


def test_outputs_put_weights_back_that_the_forward_writes() -> None:
    model, x = Rescaling(), torch.randn(3, 4)
    before = snapshot(model)
    first = outputs(model, x)
    assert snapshot(model) == before
    assert torch.equal(outputs(model, x)[0][1], first[0][1])
