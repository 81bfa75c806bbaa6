"""NP406, on attention with learned scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normprobe

Scale = Callable[[Tensor], Tensor]
FREE: list[Scale] = [
    torch.exp,
    lambda tau: 2 * tau,
    lambda tau: tau.clamp(min=0.1).exp(),
    F.softplus,
    lambda tau: tau * tau.sigmoid(),
]
HELD: list[Scale] = [
    lambda tau: tau.clamp(max=4.6).exp(),
    lambda tau: tau.exp().clamp(0.0, 100.0),
    lambda tau: torch.clamp_max(tau, 4.6).exp(),
    lambda tau: 10 * tau.sigmoid(),
    lambda tau: torch.minimum(tau.exp(), torch.tensor(100.0)),
]


class Cosine(nn.Module):
    """Attention of unit queries and keys with a learned temperature, on the logits or on the queries."""

    def __init__(self, scale: Scale, on_queries: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.tau, self.scale, self.on_queries = nn.Parameter(torch.tensor(2.0)), scale, on_queries

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.normalize(self.q(x), dim=-1), F.normalize(self.k(x), dim=-1)
        if self.on_queries:
            return F.scaled_dot_product_attention(q * self.scale(self.tau), k, self.v(x), scale=1.0)
        return (q @ k.mT * self.scale(self.tau)).softmax(-1) @ self.v(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("on_queries", [False, True])
@pytest.mark.parametrize("scale", FREE)
def test_a_temperature_without_a_largest_value(scale: Scale, on_queries: bool) -> None:
    report = normprobe.probe(Cosine(scale, on_queries), torch.randn(1, 8, 32), level="structure")
    (site,) = report.anatomy.attention
    assert (site.scale, site.scale_parameter, site.scale_bounded) == (None, "tau", False)
    (found,) = [f for f in report.findings if f.code == "NP406"]
    assert found.severity.value == "note"
    assert found.message == "the factor on q·k comes from tau, and nothing holds it under a largest value"


@pytest.mark.parametrize("on_queries", [False, True])
@pytest.mark.parametrize("scale", HELD)
def test_a_temperature_that_is_held(scale: Scale, on_queries: bool) -> None:
    report = normprobe.probe(Cosine(scale, on_queries), torch.randn(1, 8, 32), level="structure")
    (site,) = report.anatomy.attention
    assert (site.scale_parameter, site.scale_bounded) == ("tau", True)
    assert [f.code for f in report.findings if f.code == "NP406"] == []


def test_a_constant_scale_is_not_learned() -> None:
    report = normprobe.probe(Cosine(lambda tau: torch.tensor(0.2), False), torch.randn(1, 8, 32), level="structure")
    assert report.anatomy.attention[0].scale_bounded is None
