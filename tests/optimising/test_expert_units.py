"""The units of weights that hold several experts."""

from __future__ import annotations

import torch
from torch import nn

import normprobe
from tests import models
from tests.rewrites.test_reparametrise import Experts


def test_an_output_of_each_expert_is_clipped_for_itself() -> None:
    """Brock et al. 2021, eq. 3, one expert and output at a time, in float64; another expert's gradient is larger."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Experts(), Experts(), nn.Linear(models.WIDTH, 5)), torch.randn(2, 6, models.WIDTH)
    optimiser, weight = torch.optim.SGD(model.parameters(), lr=1.0), model[0].up
    normprobe.AdaptiveClipping(optimiser, model, x, clipping=0.1, eps=1e-3)
    gradient = torch.randn(weight.shape) * torch.tensor([1e-3, 1.0, 10.0]).reshape(3, 1, 1)
    weight.grad = gradient.clone()
    held = weight.detach().double().norm(dim=2, keepdim=True)
    optimiser.step()
    found = gradient.double().norm(dim=2, keepdim=True)
    wanted = gradient.double() * (0.1 * held / found).clamp(max=1.0)
    assert torch.allclose(weight.grad.double(), wanted, rtol=1e-5, atol=1e-9)
    assert torch.equal(weight.grad[0], gradient[0])
