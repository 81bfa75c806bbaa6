"""Networks whose blocks are no modules: one forward over lists of parameters, over stacked parameters, or over two
lists of layers; with faults that a slip in such a forward makes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, VOCABULARY = 16, 4, 2, 32
INPUT = torch.arange(24).view(2, 12)


class Plain(nn.Module):
    """A pre-norm decoder in one forward. `slip` is what went wrong in it, `eps` that of its norms.

    Attributes:
        stacked: whether one parameter holds the weights of all layers, as a port of a scan has it.
    """

    def __init__(self, slip: str = "", stacked: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.slip, self.eps, self.stacked = slip, eps, stacked
        self.embedding = nn.Parameter(0.02 * torch.randn(VOCABULARY, WIDTH))
        self.qkv, self.out = self.drawn(3 * WIDTH, WIDTH), self.drawn(WIDTH, WIDTH)
        self.up, self.down = self.drawn(4 * WIDTH, WIDTH), self.drawn(WIDTH, 4 * WIDTH)
        self.first, self.second = self.held([torch.ones(WIDTH)] * LAYERS), self.held([torch.ones(WIDTH)] * LAYERS)
        self.last = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / math.sqrt(WIDTH))

    def drawn(self, rows: int, columns: int) -> nn.Parameter | nn.ParameterList:
        return self.held([torch.randn(rows, columns) / math.sqrt(columns) for _ in range(LAYERS)])

    def held(self, layers: list[Tensor]) -> nn.Parameter | nn.ParameterList:
        if self.stacked:
            return nn.Parameter(torch.stack(layers))
        return nn.ParameterList([nn.Parameter(layer.clone()) for layer in layers])

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * gain

    def attend(self, x: Tensor, layer: int) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (x @ self.qkv[layer].T).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, WIDTH) @ self.out[layer].T

    def feed(self, x: Tensor, layer: int) -> Tensor:
        return F.gelu(x @ self.up[layer].T) @ self.down[layer].T

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids]
        for layer in range(LAYERS):
            h = self.norm(x, self.first[layer])
            if self.slip == "every attention raw" or (self.slip == "one attention raw" and layer == 2):
                h = x
            if self.slip == "one norm on the trunk" and layer == 2:
                x = h
            x = x + self.attend(h, layer)
            h = self.norm(x, self.second[layer])
            if self.slip == "normed twice" and layer == 1:
                h = self.norm(h, self.second[layer])
            x = self.feed(h, layer) + (0 if self.slip == "no skip" else x)
            if self.slip == "last norm too early" and layer == LAYERS - 2:
                x = self.norm(x, self.last)
        x = x if self.slip in ("last norm too early", "no last norm") else self.norm(x, self.last)
        return x @ self.head.T


class Pairs(nn.Module):
    """A pre-norm encoder whose layers lie in two lists, one of MLPs and one of mixers; all adds are in its forward."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.slip = slip
        self.mixers = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            h = self.norms[2 * layer](x)
            h = x if self.slip == "every attention raw" else h
            x = x + mixer(h, h, h, need_weights=False)[0]
            h = self.norms[2 * layer + 1](x)
            x = x + mlp(x if self.slip == "one mlp raw" and layer == 2 else h)
        return self.head(self.norms[-1](x))
