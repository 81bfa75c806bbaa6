"""The demo model: a pre-norm character decoder that goes without the norm before its head.

Dims: B batch, T tokens, D width, H heads, K head width, V characters.
"""

from __future__ import annotations

from importlib import resources

import torch
import torch.nn.functional as F
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

ALPHABET = "\n !'(),.:;?ABCDEFGHIJKLMNOPRSTUVWYZabcdefghijklmnopqrstuvwxyz"
"""The characters that the model knows; a character's token id is its index."""

CONTEXT = 128
"""Number of tokens that the model was trained on at once."""

EPS = 1e-5
ROTARY_BASE = 10_000.0


def rotate(x_BHTK: Tensor) -> Tensor:
    """Rotary position embedding on halves of the head (Su et al. 2021, sec. 3.2).

    Args:
        x_BHTK: queries or keys, floating point, K even; token t is at position t.

    Returns:
        The rotated tensor, of the same shape and dtype.
    """
    tokens, half = x_BHTK.shape[-2], x_BHTK.shape[-1] // 2
    position = torch.arange(tokens, device=x_BHTK.device, dtype=torch.float32)
    exponent = torch.arange(half, device=x_BHTK.device, dtype=torch.float32) / half
    angle_TK = torch.outer(position, ROTARY_BASE**-exponent)
    cos, sin = angle_TK.cos().to(x_BHTK.dtype), angle_TK.sin().to(x_BHTK.dtype)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each token's weighted mean of the values at and before it."""
        batch, tokens, width = x_BTD.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.query_key_value(x_BTD).chunk(3, dim=-1))
        mixed_BHTK = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        mixed: Tensor = self.output(mixed_BHTK.transpose(1, 2).reshape(batch, tokens, width))
        return mixed


class Block(nn.Module):
    """One pre-norm block: attention, then an MLP four times as wide, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=EPS)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=EPS)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream_BTD: Tensor) -> Tensor:
        """The stream with both branches added."""
        stream_BTD = stream_BTD + self.attention(self.attention_norm(stream_BTD))
        stream_BTD = stream_BTD + self.down(F.gelu(self.up(self.mlp_norm(stream_BTD))))
        return stream_BTD


class Decoder(nn.Module):
    """Pre-norm decoder over the characters of `ALPHABET`; (B, T) token ids to (B, T, V) logits.

    Args:
        width: features of the residual stream.
        depth: number of blocks, with two writes to the stream each.
        heads: attention heads; `width / heads` must be even.
        final_norm: whether a norm stands before the head. The shipped model was trained without it.
    """

    def __init__(self, width: int = 48, depth: int = 6, heads: int = 4, *, final_norm: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.final_norm = nn.RMSNorm(width, eps=EPS) if final_norm else None
        self.head = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next character at every place."""
        stream_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            stream_BTD = block(stream_BTD)
        if self.final_norm is not None:
            stream_BTD = self.final_norm(stream_BTD)
        logits_BTV: Tensor = self.head(stream_BTD)
        return logits_BTV


def encode(text: str) -> Tensor:
    """Token ids of `text`, int64 of shape (len(text),).

    Raises:
        ValueError: a character is not in `ALPHABET`.
    """
    foreign = sorted(set(text) - set(ALPHABET))
    if foreign:
        raise ValueError(f"the demo model knows {len(ALPHABET)} characters, not {''.join(foreign)!r}")
    return torch.tensor([ALPHABET.index(character) for character in text], dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """The text of a one-dimensional tensor of token ids; the inverse of `encode`."""
    return "".join(ALPHABET[token] for token in tokens.tolist())


def heldout_text() -> str:
    """The text that the model was not trained on: the book of Ruth, 13,007 characters."""
    return resources.files("normprobe.demo").joinpath("heldout.txt").read_text(encoding="ascii")


def load() -> Decoder:
    """The trained decoder in float32 and eval mode, from the weights in the package (stored in float16)."""
    model = Decoder()
    weights = load_safetensors(resources.files("normprobe.demo").joinpath("model.safetensors").read_bytes())
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval()


def build() -> tuple[Decoder, Tensor]:
    """The trained decoder and token ids for it.

    Returns:
        The model, and the first `CONTEXT` characters of the held-out text, int64 of shape (1, CONTEXT).
    """
    return load(), encode(heldout_text()[:CONTEXT])[None]
