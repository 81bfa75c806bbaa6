"""The closed forms against torch's own kernels, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe.norms import reference


def sample(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64) + 0.4


MAP, ROWS = sample(3, 8, 5, 4), sample(3, 5, 8)
PAIRS = {
    "layernorm": (reference.layernorm(ROWS, 1e-3), F.layer_norm(ROWS, (8,), eps=1e-3)),
    "layernorm, two axes": (reference.layernorm(ROWS, 1e-3, (-2, -1)), F.layer_norm(ROWS, (5, 8), eps=1e-3)),
    "rmsnorm": (reference.rmsnorm(ROWS, 1e-3), F.rms_norm(ROWS, (8,), eps=1e-3)),
    "l2norm": (reference.l2norm(ROWS, 2.5), F.normalize(ROWS, dim=-1, eps=2.5)),
    "scalenorm": (reference.scalenorm(ROWS, 3.0, 1e-5), 3.0 * F.normalize(ROWS, dim=-1, eps=1e-5)),
    "batchnorm": (reference.batchnorm(MAP, 1e-3), F.batch_norm(MAP, None, None, training=True, eps=1e-3)),
    "groupnorm": (reference.groupnorm(MAP, 4, 1e-3), F.group_norm(MAP, 4, eps=1e-3)),
    "instancenorm": (reference.instancenorm(MAP, 1e-3), F.instance_norm(MAP, eps=1e-3)),
    "lrn, odd window": (reference.lrn(MAP, 3, 0.1, 0.6, 2.0), F.local_response_norm(MAP, 3, 0.1, 0.6, 2.0)),
    "lrn, even window": (reference.lrn(MAP, 4, 0.1, 0.6, 2.0), F.local_response_norm(MAP, 4, 0.1, 0.6, 2.0)),
    "dyt": (reference.dyt(ROWS, 0.5, 2.0, 1.0), 2 * torch.tanh(ROWS / 2) + 1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_agrees_with_torch(name: str) -> None:
    ours, theirs = PAIRS[name]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_stored_statistics() -> None:
    mean, variance = sample(8), sample(8).square()
    theirs = F.batch_norm(MAP, mean, variance, training=False, eps=1e-3)
    torch.testing.assert_close(reference.batchnorm_frozen(MAP, mean, variance, 1e-3), theirs)


def test_global_response_of_equal_channels_is_one() -> None:
    x = sample(2, 4, 4, 1).expand(2, 4, 4, 6)
    torch.testing.assert_close(reference.grn(x, 0.5, 0.25), 1.5 * x + 0.25)
