"""NP214, and NP108 where a layer norm is none: statistics over tokens, on models and on records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.checks import find, run
from normprobe.records import Finding
from tests.checks import builders as b

WIDTH, TOKENS = 16, 7


class TokenRMS(nn.Module):
    """x · rsqrt(mean(x²)) with the mean over axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight


class LayerNorm(TokenRMS):
    """Named so, and centred over axis 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Turned(nn.Module):
    """A layer norm of the last axis, which a transposition has given to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT  # type: ignore[no-any-return]


class ChannelsFirst(nn.Module):
    """Features on axis 1, and normed there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = TokenRMS()
        self.norm.weight = nn.Parameter(torch.rand(WIDTH, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], causal: bool) -> None:
        super().__init__()
        self.causal, self.first, self.second = causal, norm(), norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


def found(norm: Callable[[], nn.Module], causal: bool = True) -> list[Finding]:
    torch.manual_seed(0)
    blocks = [Block(norm, causal) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(32, WIDTH), *blocks, norm(), nn.Linear(WIDTH, 32)).eval()
    return list(normprobe.probe(model, torch.randint(0, 32, (2, TOKENS)), level="structure").findings)


@pytest.mark.parametrize("norm", [TokenRMS, LayerNorm, Turned])
def test_norms_over_tokens_of_a_causal_model_are_the_first_error(norm: Callable[[], nn.Module]) -> None:
    first = found(norm)[0]
    assert (first.code, first.severity.value, len(first.places)) == ("NP214", "error", 7)
    assert "NP214" not in {f.code for f in found(norm, causal=False)}


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH, eps=1e-6), ChannelsFirst])
def test_norms_over_features_are_silent(norm: Callable[[], nn.Module]) -> None:
    assert {f.code for f in found(norm)} <= {"NP106"}


def test_a_class_named_layer_norm_that_norms_tokens_is_misnamed() -> None:
    assert "NP108" in {f.code for f in found(LayerNorm, causal=False)}
    assert "NP108" not in {f.code for f in found(TokenRMS, causal=False)}


@pytest.mark.parametrize(
    ("name", "groups", "count"), [("LayerNorm", 4, 1), ("LayerNorm", 1, 0), ("MultiHeadLayerNorm", 4, 0)]
)
def test_np108_of_groups(name: str, groups: int, count: int) -> None:
    norm = b.norm(kind="groupnorm", groups=groups, class_name=name, subtracts_mean=True)
    found, _ = run(b.document(norms=(norm,)), [find("NP108")])
    assert len(found) == count


CAUSAL, FREE = b.site(causal=True), b.site(causal=None)


@pytest.mark.parametrize(
    ("norm", "sites", "outcome"),
    [
        ({"over_places": True}, (CAUSAL,), (1, 0)),
        ({"over_places": True}, (CAUSAL, FREE), (0, 0)),
        ({"over_places": True}, (b.site(causal=True, cross=True),), (0, 0)),
        ({"over_places": True}, (), (0, 0)),
        ({"over_places": True, "kind": "batchnorm"}, (CAUSAL,), (0, 0)),
        ({"over_places": True}, (b.site("blocks.1.attn", causal=True),), (0, 0)),
        ({"over_places": False}, (CAUSAL,), (0, 0)),
        ({"over_places": None}, (CAUSAL,), (0, 0)),
        ({"over_places": None, "axes": (1,)}, (CAUSAL,), (0, 1)),
        ({"over_places": True, "path": "elsewhere"}, (CAUSAL,), (0, 0)),
    ],
)
def test_np213_on_records(norm: dict[str, Any], sites: Any, outcome: tuple[int, int]) -> None:
    branches = (b.branch("blocks.0", kind="attention"), b.branch("blocks.1"))
    document = b.document(norms=(b.norm(**norm),), streams=(b.stream(branches=branches),), attention=sites)
    assert tuple(map(len, run(document, [find("NP214")]))) == outcome
