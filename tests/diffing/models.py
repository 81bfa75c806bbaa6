"""Models to hold against each other: one decoder with options, and a port of transformers' Llama by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 32, 4, 64


class RMS(nn.Module):
    """RMSNorm with its options written out."""

    def __init__(self, width: int, eps: float = 1e-6, plus_one: bool = False, late_gain: bool = False) -> None:
        super().__init__()
        self.eps, self.plus_one, self.late_gain = eps, plus_one, late_gain
        self.weight = nn.Parameter(0.1 * torch.randn(width) + (0.0 if plus_one else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight if self.plus_one else self.weight
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return gain * y.to(x.dtype) if self.late_gain else (gain.float() * y).to(x.dtype)


class Attention(nn.Module):
    def __init__(
        self, softcap: float | None = None, scale: float | None = None, fused: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMS(WIDTH // HEADS) for _ in range(2)) if qk_norm else None
        self.softcap, self.scale, self.fused = softcap, scale or (WIDTH // HEADS) ** -0.5, fused
        names = ("qkv",) if fused else ("q", "k", "v")
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH * (3 if fused else 1), bias=False))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (row.unflatten(-1, (HEADS, -1)).transpose(1, 2) for row in rows)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        logits = 3 * (q @ k.transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, norm: dict[str, Any], attention: dict[str, Any]) -> None:
        super().__init__()
        self.function = F.gelu
        self.first, self.second = RMS(WIDTH, **norm), RMS(WIDTH, **norm)
        self.attention = Attention(**attention)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(self.function(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(
        self,
        depth: int = 3,
        vocabulary: int = VOCABULARY,
        norm: dict[str, Any] | None = None,
        attention: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(norm or {}, attention or {}) for _ in range(depth))
        self.norm = RMS(WIDTH, **(norm or {}))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).eval()


def twin(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def tokens(length: int = 12, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


class PortBlock(nn.Module):
    """A block of Llama by hand: one weight for q, k and v, one for both gates, rotary pairs side by side."""

    def __init__(self, theirs: Any, config: Any) -> None:
        super().__init__()
        width, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.before_mixing, self.before_feeding = (RMS(width, config.rms_norm_eps) for _ in range(2))
        self.wqkv = nn.Linear(width, (heads + 2 * kv) * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w13 = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, width, bias=False)
        mixer, feed = theirs.self_attn, theirs.mlp
        sides = [self._paired(mixer.q_proj.weight, heads), self._paired(mixer.k_proj.weight, kv), mixer.v_proj.weight]
        with torch.no_grad():
            self.wqkv.weight.copy_(torch.cat(sides))
            self.wo.weight.copy_(mixer.o_proj.weight)
            self.w13.weight.copy_(torch.cat([feed.gate_proj.weight, feed.up_proj.weight]))
            self.w2.weight.copy_(feed.down_proj.weight)
            self.before_mixing.weight.copy_(theirs.input_layernorm.weight)
            self.before_feeding.weight.copy_(theirs.post_attention_layernorm.weight)

    def _paired(self, weight: Tensor, heads: int) -> Tensor:
        """Rows of halves in the order of pairs."""
        return weight.view(heads, 2, self.size // 2, -1).transpose(1, 2).reshape(weight.shape)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.before_mixing(x)).split([n * self.size for n in (self.heads, self.kv, self.kv)], -1)
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in (q, k, v))
        q, k = (_turned(t, turn) for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.kv, 2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        gate, up = self.w13(self.before_feeding(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding on pairs that stand side by side. x [B, S, H, D], turn [S, D/2, 2]: cosine and sine."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cosine, sine = turn[None, :, None, :, 0], turn[None, :, None, :, 1]
    return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)


class Port(nn.Module):
    """transformers' Llama with other names and another layout, its weights copied."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = theirs.config
        self.theta, self.size = config.rope_parameters["rope_theta"], config.hidden_size // config.num_attention_heads
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack = nn.ModuleList(PortBlock(layer, config) for layer in theirs.model.layers)
        self.last = RMS(config.hidden_size, config.rms_norm_eps)
        self.readout = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        with torch.no_grad():
            self.words.weight.copy_(theirs.model.embed_tokens.weight)
            self.last.weight.copy_(theirs.model.norm.weight)
            self.readout.weight.copy_(theirs.lm_head.weight)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        steps = torch.arange(0, self.size, 2, device=x.device) / self.size
        angles = torch.outer(torch.arange(words.shape[1], device=x.device).float(), self.theta**-steps)
        turn = torch.stack([angles.cos(), angles.sin()], -1).to(x.dtype)
        for block in self.stack:
            x = block(x, turn)
        return self.readout(self.last(x))


def llama_and_port() -> tuple[Any, Port]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=2, **small, **tokens)
    theirs = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs, Port(theirs).eval()
