"""Under automatic mixed precision the model computes in few bits, and what looks at it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from tests.measures.models import llama


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(self.norm(x)).relu())


def test_the_stream_equals_a_float64_reference() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(16) for _ in range(4))).eval(), torch.randn(2, 6, 16)
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, o: states.append(o.double())) for block in model]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)
    for hook in hooks:
        hook.remove()
    (stream,) = probe(model, x, autocast="bfloat16").residual
    for found, state in zip(stream.states, states, strict=True):
        rows = state.flatten(0, 1)
        rank = float(rows.square().sum() / torch.linalg.matrix_norm(rows, 2) ** 2)
        unit = state / state.norm(dim=-1, keepdim=True)
        pairs = (unit.sum(1).square().sum(-1) - 6) / 30
        assert found.stable_rank == pytest.approx(rank, rel=1e-5)
        assert found.token_cosine == pytest.approx(float(pairs.mean()), rel=1e-4)
        assert found.mean == pytest.approx(float(state.mean()), rel=1e-4, abs=1e-7)


def test_logits_are_those_of_the_queries_and_keys_that_the_kernel_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    case = llama(attention="sdpa")
    seen: list[Tensor] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **given: object) -> Tensor:
        keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        seen.append(query.double() @ keys.mT * query.shape[-1] ** -0.5)
        return kernel(query, key, value, **given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        case.model(**case.inputs)
    found = probe(case.model, case.inputs, autocast="bfloat16").attention
    for site, logits in zip(found, seen, strict=True):
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        for head, values in zip(site.heads, logits.unbind(1), strict=True):
            shown = values[:, causal]
            assert head.sampled_max == pytest.approx(float(shown.max()), rel=1e-5)
            assert head.std == pytest.approx(float(shown.std(correction=0)), rel=1e-5)
