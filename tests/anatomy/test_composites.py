"""Attention functions that dissolve or compile are read as one operation, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import normprobe
from normprobe.records import AttentionSite
from tests.anatomy.reading import anatomy_of
from tests.models import SMALL, hugging_face

WIDTH, HEADS, TOKENS = 16, 2, 12


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("grad", [False, True])
def test_multi_head_attention_runs_the_attention_function(device: str, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=True, device=device)
    layer.requires_grad_(grad)
    (site,) = anatomy_of(layer.eval(), torch.randn(2, TOKENS, WIDTH, device=device)).attention
    assert (site.path, site.kernel, site.causal) == ("self_attn", "scaled_dot_product_attention", False)
    assert (site.heads, site.kv_heads, site.head_dim, site.scale) == (HEADS, HEADS, 8, pytest.approx(8**-0.5))
    assert set(site.columns) == {"q", "k", "v"}


def test_the_function_inside_multi_head_attention_is_measured() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True).eval()
    report = normprobe.probe(layer, torch.randn(2, TOKENS, WIDTH))
    assert len(report.attention[0].heads) == HEADS


class Flex(nn.Module):
    """Flexible attention with grouped heads; `given(tokens, device)` are its keywords."""

    def __init__(self, given: Callable[[int, torch.device], dict[str, Any]]) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (1, -1)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        y = flex_attention(q, k, v, enable_gqa=True, **self.given(x.shape[1], x.device))
        return x + self.out(y.transpose(1, 2).flatten(-2))


def block(tokens: int, device: torch.device, seen: Callable[..., Tensor]) -> dict[str, Any]:
    return {"block_mask": create_block_mask(seen, None, None, tokens, tokens, device=str(device))}


def facts(site: AttentionSite) -> tuple[float | None, float | None, bool | None, int | None, bool]:
    return site.scale, site.softcap, site.causal, site.window, site.biased


FLEX = {
    "plain": (lambda t, d: {}, (8**-0.5, None, False, None, False)),
    "scaled": (lambda t, d: {"scale": 0.25}, (0.25, None, False, None, False)),
    "causal": (lambda t, d: block(t, d, lambda b, h, i, j: i >= j), (8**-0.5, None, True, None, False)),
    "window": (
        lambda t, d: block(t, d, lambda b, h, i, j: (i >= j) & (i - j < 4)),
        (8**-0.5, None, True, 4, False),
    ),
    "capped": (
        lambda t, d: {"score_mod": lambda s, b, h, i, j: 20 * torch.tanh(s / 20)},
        (8**-0.5, 20.0, False, None, False),
    ),
    "position bias": (
        lambda t, d: {"score_mod": lambda s, b, h, i, j: s + (j - i)},
        (8**-0.5, None, False, None, True),
    ),
    "hidden by the score": (
        lambda t, d: {"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)},
        (8**-0.5, None, True, None, False),
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", FLEX)
def test_flexible_attention_is_read_with_its_functions(name: str) -> None:
    given, expected = FLEX[name]
    (site,) = anatomy_of(Flex(given).eval(), torch.randn(2, TOKENS, WIDTH)).attention
    assert (site.kernel, site.heads, site.kv_heads, set(site.columns)) == ("flex_attention", HEADS, 1, {"q", "k", "v"})
    assert facts(site) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore::DeprecationWarning")
def test_flexible_attention_as_transformers_compiles_it() -> None:
    small = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3}
    model, inputs = hugging_face("Gemma2ForCausalLM", "Gemma2Config", **small, attn_implementation="flex_attention")
    sliding, full = anatomy_of(model, inputs).attention
    assert facts(sliding) == pytest.approx((0.25, 50.0, True, 3, False))
    assert facts(full) == pytest.approx((0.25, 50.0, True, None, False))
