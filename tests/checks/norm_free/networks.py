"""Small networks whose weights are normed, whose norms are bounded maps, or whose scale constants hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

IMAGE = (4, 3, 16, 16)
WIDTH = 16


class Inline(nn.Module):
    """A linear layer with g · v / (‖v‖ + eps) written into its forward."""

    def __init__(self, inputs: int, outputs: int, eps: float = 0.0) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(outputs, inputs))
        self.size = nn.Parameter(torch.ones(outputs, 1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = self.direction.square().sum(1, keepdim=True).sqrt()
        return F.linear(x, self.size * self.direction / (norm + self.eps))


class Filters(nn.Conv2d):
    """A convolution with scaled weight standardisation: a gain a filter, divided by the root of the fan-in."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, eps: float = 1e-6) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        scale = self.gain / (variance * self.weight[0].numel()).clamp_min(self.eps).sqrt()
        return F.conv2d(x, (self.weight - mean) * scale, self.bias, self.stride, self.padding)


class FreeBlock(nn.Module):
    """shortcut + alpha · f(act(x) · beta), as in NFNets."""

    def __init__(self, width: int, alpha: float, beta: float, wider: bool = False) -> None:
        super().__init__()
        self.alpha, self.beta, self.act = alpha, beta, nn.SiLU()
        self.first, self.second = Filters(width, width), Filters(width, width * 2 if wider else width)
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), Filters(width, width * 2, 1)) if wider else None
        self.pool: nn.Module = nn.AvgPool2d(2) if wider else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(x) * 1.7868 * self.beta
        trunk = x if self.shortcut is None else self.shortcut(y)
        return trunk + self.alpha * self.pool(self.second(self.act(self.first(y)) * 1.7868))


class Free(nn.Module):
    """Two stages of blocks without norms, with the constants that fit; `beta` multiplies those of some blocks."""

    def __init__(self, alpha: float = 0.2, beta: dict[int, float] | None = None, each: int = 3) -> None:
        super().__init__()
        self.stem = Filters(3, WIDTH)
        blocks, variance, width = [], 1.0, WIDTH
        for i in range(2 * each):
            wider = i == each
            factor = (beta or {}).get(i, 1.0)
            blocks.append(FreeBlock(width, alpha, factor / variance**0.5, wider))
            variance = (1.0 if wider else variance) + alpha**2
            width = 2 * width if wider else width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Held(nn.Module):
    """Perceptrons on a stream that constants hold, x + alpha · f(x / beta), without standardised weights."""

    def __init__(self, alpha: float = 0.5, wrong: float = 1.0, depth: int = 4) -> None:
        super().__init__()
        self.alpha, self.wrong = alpha, wrong
        self.embed = nn.Linear(8, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(64, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)
        for layer in (self.embed, *self.ups, *self.downs):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x, variance = self.embed(x), 1.0
        for up, down in zip(self.ups, self.downs, strict=True):
            branch = down(torch.relu(up(x / variance**0.5 * self.wrong)) * 2**0.5)
            x, variance = x + self.alpha * branch, variance + self.alpha**2
        return self.head(x)


class Bent(nn.Module):
    """Dynamic Tanh: gain · tanh(alpha · x) + offset."""

    def __init__(self, width: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class Softsign(nn.Module):
    """Another bounded stand-in: x · s / (1 + |x · s|) with a gain."""

    def __init__(self, width: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.slope, self.weight = nn.Parameter(torch.full((width,), alpha)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.softsign(self.slope * x) * self.weight


class Attends(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Pre-norm blocks behind an embedding of unit size, any bounded map in the place of norms."""

    def __init__(self, norm: Callable[[int], nn.Module], size: float = 1.0, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        nn.init.normal_(self.embed.weight, std=size)
        self.blocks, self.norm = nn.Sequential(*(Attends(norm) for _ in range(depth))), norm(WIDTH)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class Written(nn.Module):
    """Perceptrons on a stream, behind a tanh of learned slope that is written into the forward."""

    def __init__(self, alpha: float = 0.5, depth: int = 3) -> None:
        super().__init__()
        self.alphas = nn.ParameterList(nn.Parameter(torch.tensor(alpha)) for _ in range(depth))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(32, WIDTH) for _ in range(depth))
        self.embed = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for alpha, gain, up, down in zip(self.alphas, self.gains, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(gain * torch.tanh(alpha * x))))
        return x


class Vocoder(nn.Module):
    """Dilated convolutions beside a stream, each weight-normed by hooks, as in HiFi-GAN."""

    def __init__(self) -> None:
        super().__init__()
        normed = torch.nn.utils.parametrizations.weight_norm
        self.first = normed(nn.Conv1d(4, 8, 7, padding=3))
        self.up = normed(nn.ConvTranspose1d(8, 8, 4, 2, 1))
        self.blocks = nn.ModuleList(normed(nn.Conv1d(8, 8, 3, dilation=d, padding=d)) for d in (1, 3, 5))
        self.last = normed(nn.Conv1d(8, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(self.first(x), 0.1))
        for block in self.blocks:
            x = x + block(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(x))


def discriminator() -> nn.Module:
    """A stack of spectrally normed convolutions."""
    spectral = parametrizations.spectral_norm
    layers = [spectral(nn.Conv2d(3, 8, 3, 2, 1)), nn.LeakyReLU(0.1), spectral(nn.Conv2d(8, 16, 3, 2, 1))]
    return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Flatten(), spectral(nn.Linear(256, 1)))


def perceptron(eps: float = 0.0) -> nn.Module:
    """Inline weight norm in two layers."""
    return nn.Sequential(Inline(8, WIDTH, eps), nn.ReLU(), Inline(WIDTH, 4, eps))
