"""What masks say: causal or not, how far a query looks, sinks and biases, however the mask was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.records import AttentionSite
from tests.anatomy.reading import anatomy_of
from tests.models import SMALL, bloom, hugging_face, llama, t5

WIDTH, HEADS, TOKENS = 16, 2, 6
LOWEST = torch.finfo(torch.float32).min

Masking = Callable[[nn.Module, Tensor], Tensor]


class Written(nn.Module):
    """Attention written out; `masking(self, logits)` gives what the softmax reads."""

    def __init__(self, masking: Masking) -> None:
        super().__init__()
        self.qkv, self.out, self.masking = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), masking
        self.register_buffer("lower", torch.ones(32, 32).tril().view(1, 1, 32, 32), persistent=False)
        self.learned = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.sink = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.masking(self, q @ k.mT / 3).softmax(-1)[..., : x.shape[1]].to(x.dtype)
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Fused(nn.Module):
    """Torch's attention function; `given(tokens)` are its keywords."""

    def __init__(self, given: Callable[[int], dict[str, Any]]) -> None:
        super().__init__()
        self.qkv, self.out, self.given = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), given

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        given = self.given(x.shape[1]) if mask is None else {"attn_mask": mask}
        return x + self.out(F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).reshape(x.shape))


def only(model: nn.Module, *inputs: Tensor) -> AttentionSite:
    (site,) = anatomy_of(model.eval(), inputs or (torch.randn(2, TOKENS, WIDTH),)).attention
    return site


def read(model: nn.Module, *inputs: Tensor) -> tuple[bool | None, int | None, bool, bool]:
    site = only(model, *inputs)
    return site.causal, site.window, site.sinks, site.biased


def future(m: nn.Module, p: Tensor) -> Tensor:
    """True above the diagonal."""
    return m.lower[:, :, : p.shape[-2], : p.shape[-1]] == 0


def filled_by_rows(m: nn.Module, p: Tensor) -> Tensor:
    mask = torch.full((TOKENS, TOKENS), -torch.inf)
    for i in range(TOKENS):
        mask[i, : i + 1] = 0
    return p + mask


def band(tokens: int, back: int, ahead: int) -> Tensor:
    apart = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (apart <= back) & (apart >= -ahead)


CAUSAL = {
    "added": lambda m, p: p + torch.full((TOKENS, TOKENS), -torch.inf).triu(1),
    "filled": lambda m, p: p.masked_fill(future(m, p), LOWEST),
    "filled in place": lambda m, p: p.masked_fill_(future(m, p), -1e4),
    "chosen": lambda m, p: torch.where(future(m, p), torch.tensor(LOWEST), p),
    "taken away": lambda m, p: p * m.lower[..., :TOKENS, :TOKENS] - 1e4 * (1 - m.lower[..., :TOKENS, :TOKENS]),
    "kept above the lowest": lambda m, p: torch.max(p + LOWEST * future(m, p), torch.tensor(LOWEST)),
    "written row by row": filled_by_rows,
    "capped before": lambda m, p: (5 * torch.tanh(p / 5)).masked_fill(future(m, p), -torch.inf),
    "filled with -100": lambda m, p: p.masked_fill(future(m, p), -100.0),
    "in double": lambda m, p: p.double().masked_fill(future(m, p), -torch.inf),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_of_later_keys_is_causal_however_it_is_written(name: str) -> None:
    assert read(Written(CAUSAL[name])) == (True, None, False, False)


OTHERS = {
    "none": (lambda m, p: p, (False, None, False, False)),
    "window": (lambda m, p: p.masked_fill(~band(TOKENS, 2, 0), -torch.inf), (True, 3, False, False)),
    "both sides": (lambda m, p: p.masked_fill(~band(TOKENS, 2, 2), -torch.inf), (False, 2, False, False)),
    "chunks": (
        lambda m, p: p.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).masked_fill(
            (torch.arange(TOKENS) // 3)[:, None] != torch.arange(TOKENS) // 3, -torch.inf
        ),
        (True, None, False, False),
    ),
    "shifted windows": (lambda m, p: p - 100.0 * ~band(TOKENS, 1, 5), (False, None, False, False)),
    "learned bias": (lambda m, p: p + m.learned, (False, None, False, True)),
    "learned bias and mask": (
        lambda m, p: p + (m.learned + LOWEST * future(m, p)),
        (True, None, False, True),
    ),
    "slopes": (
        lambda m, p: (p - torch.arange(TOKENS).flip(0)).masked_fill(future(m, p), -torch.inf),
        (True, None, False, True),
    ),
    "slopes and shifted windows": (
        lambda m, p: p - (torch.arange(TOKENS).flip(0) + 100.0 * future(m, p)),
        (True, None, False, True),
    ),
    "steep slopes": (lambda m, p: p - 20.0 * torch.arange(TOKENS).flip(0), (False, None, False, True)),
    "scaled to nothing": (lambda m, p: (p - 1000.0 * future(m, p)) * 0.001, (False, None, False, True)),
    "taken twice": (lambda m, p: torch.add(p, future(m, p).float(), alpha=-100.0), (True, None, False, False)),
    "scaled and hidden still": (lambda m, p: (p - 1000.0 * future(m, p)) / 4, (True, None, False, False)),
    "scaled by what differs": (
        lambda m, p: p.masked_fill(future(m, p), -1000.0) * m.sink.view(-1, 1, 1).sigmoid(),
        (None, None, False, False),
    ),
    "raised in some rows": (
        lambda m, p: p + 60.0 * (1 - future(m, p).float()) * (torch.arange(TOKENS) < 3).view(-1, 1),
        (False, None, False, True),
    ),
    "hidden by its size": (lambda m, p: p.masked_fill(p > 0.1, -torch.inf), (None, None, False, False)),
    "learned sink": (
        lambda m, p: torch.cat(
            [p.masked_fill(future(m, p), LOWEST), m.sink.view(-1, 1, 1).expand(*p.shape[:3], 1)], -1
        ),
        (True, None, True, False),
    ),
    "zero sink": (lambda m, p: torch.cat([p, torch.zeros(*p.shape[:3], 1)], -1), (False, None, True, False)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_masks_say(name: str) -> None:
    masking, facts = OTHERS[name]
    assert read(Written(masking)) == facts


FUSED = {
    "none": (lambda t: {}, (False, None, False, False)),
    "said": (lambda t: {"is_causal": True}, (True, None, False, False)),
    "bool": (lambda t: {"attn_mask": band(t, t, 0)}, (True, None, False, False)),
    "window": (lambda t: {"attn_mask": band(t, 3, 0)}, (True, 4, False, False)),
    "floats": (
        lambda t: {"attn_mask": torch.zeros(t, t).masked_fill(~band(t, t, 0), LOWEST)},
        (True, None, False, False),
    ),
    "bias": (lambda t: {"attn_mask": torch.arange(t * t).view(t, t) / 9}, (False, None, False, True)),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_the_mask_of_an_attention_function_says(name: str) -> None:
    given, facts = FUSED[name]
    assert read(Fused(given)) == facts


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_is_an_input_is_read(kind: torch.dtype) -> None:
    mask = band(TOKENS, TOKENS, 0)
    if kind is not torch.bool:
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(~mask, -torch.inf)
    assert read(Fused(lambda t: {}), torch.randn(2, TOKENS, WIDTH), mask) == (True, None, False, False)


def test_one_token_tells_nothing() -> None:
    assert read(Fused(lambda t: {}), torch.randn(2, 1, WIDTH))[:2] == (None, None)


def padded(left: int, right: int) -> Tensor:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :left] = 0
    mask[0, 8 - right :] = 0
    return mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (0, 3)])
def test_padding_changes_nothing(attention: str, left: int, right: int) -> None:
    model, inputs = llama(attn_implementation=attention)
    sites = anatomy_of(model, inputs | {"attention_mask": padded(left, right)}).attention
    assert {(s.causal, s.window, s.biased) for s in sites} == {(True, None, False)}
    bert = hugging_face("BertModel", "BertConfig", hidden_size=32, num_attention_heads=4, num_hidden_layers=1,
                        intermediate_size=48, vocab_size=64, attn_implementation=attention)  # fmt: skip
    (site,) = anatomy_of(bert[0], bert[1] | {"attention_mask": padded(left, right)}).attention
    assert (site.causal, site.window, site.biased) == (False, None, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_layers_are_told_from_full_ones(attention: str, device: str) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 3}
    small = SMALL | {"num_key_value_heads": 2, "attn_implementation": attention}
    model, inputs = hugging_face("Qwen2ForCausalLM", "Qwen2Config", **small, **layers)
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    sites = anatomy_of(model.to(device), moved).attention
    assert [(s.causal, s.window) for s in sites] == [(True, 3), (True, None)]


def test_position_biases_and_masks_together() -> None:
    encoder, decoder, cross = (
        next(s for s in anatomy_of(*t5()).attention if word in s.path)
        for word in ("encoder.block.0.layer.0", "decoder.block.0.layer.0", "EncDec")
    )
    assert [(s.causal, s.biased, s.cross) for s in (encoder, decoder, cross)] == [
        (False, True, False),
        (True, True, False),
        (False, False, True),
    ]
    assert {(s.causal, s.biased) for s in anatomy_of(*bloom()).attention} == {(True, True)}
