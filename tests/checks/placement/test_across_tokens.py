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


FRAMES, PLACES = 5, 6


class Frames(nn.Module):
    """A norm of [B, T, S, D] whose statistic the places of one frame share."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1).mT).mT.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]


class OverAxis(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.weight = axis, nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(self.axis, keepdim=True) + 1e-6) * self.weight


class InTime(Block):
    """Attention of each place over the frames, [B, T, S, D], its logits written out or not."""

    written = False

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).transpose(1, 2).flatten(0, 1)
        q, k, v = self.qkv(rows).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.written:
            later = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
            mixed = (q @ k.mT * q.shape[-1] ** -0.5 + later).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.out(mixed.transpose(1, 2).flatten(2)).unflatten(0, (x.shape[0], -1)).transpose(1, 2)
        x = x + out
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Written(InTime):
    written = True


def in_time(norm: Callable[[], nn.Module], block: type[InTime]) -> normprobe.Report:
    torch.manual_seed(0)
    blocks = [block(norm, True) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, norm(), nn.Linear(WIDTH, 8)).eval()
    return normprobe.probe(model, torch.randn(2, FRAMES, PLACES, 8), level="structure")


@pytest.mark.parametrize("block", [InTime, Written])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: Frames(lambda: nn.GroupNorm(4, WIDTH)),
        lambda: Frames(lambda: nn.InstanceNorm1d(WIDTH, affine=True)),
        lambda: nn.LayerNorm((PLACES, WIDTH)),
        lambda: OverAxis(2),
    ],
)
def test_statistics_of_a_frame_are_sound_where_attention_is_causal_in_time(
    norm: Callable[[], nn.Module], block: type[InTime]
) -> None:
    report = in_time(norm, block)
    assert not report.findings or {f.code for f in report.findings} == {"NP106"}
    (skip,) = (one for one in report.skipped if one.what.startswith("NP214"))
    assert "another axis than that of the attention" in skip.why


@pytest.mark.parametrize("block", [InTime, Written])
@pytest.mark.parametrize(("axis", "over"), [(1, "over tokens"), (0, "over the samples of a batch")])
def test_statistics_over_time_or_over_the_batch_are_told_apart(axis: int, over: str, block: type[InTime]) -> None:
    first = in_time(lambda: OverAxis(axis), block).findings[0]
    assert (first.code, first.severity.value, len(first.places)) == ("NP214", "error", 7)
    assert over in first.message


CAUSAL, FREE = b.site(causal=True), b.site(causal=None)
OVER: dict[str, Any] = {"over_places": True}


@pytest.mark.parametrize(
    ("norm", "sites", "outcome"),
    [
        ({**OVER, "over_tokens": True}, (CAUSAL,), (1, 0)),
        ({**OVER, "over_tokens": True}, (CAUSAL, FREE), (0, 0)),
        ({**OVER, "over_tokens": True}, (b.site(causal=True, cross=True),), (0, 0)),
        ({**OVER, "over_tokens": True}, (), (0, 0)),
        ({**OVER, "over_tokens": True, "kind": "batchnorm"}, (CAUSAL,), (0, 0)),
        ({**OVER, "over_tokens": True}, (b.site("blocks.1.attn", causal=True),), (0, 0)),
        ({**OVER, "over_tokens": False}, (CAUSAL,), (0, 1)),
        ({**OVER, "over_tokens": False, "batch_dependent": True}, (CAUSAL,), (1, 0)),
        ({**OVER, "over_tokens": True, "batch_dependent": True}, (CAUSAL,), (1, 0)),
        (OVER, (CAUSAL,), (0, 1)),
        ({"over_places": False}, (CAUSAL,), (0, 0)),
        ({"over_places": None}, (CAUSAL,), (0, 0)),
        ({"over_places": None, "axes": (1,)}, (CAUSAL,), (0, 1)),
        ({**OVER, "over_tokens": True, "path": "elsewhere"}, (CAUSAL,), (0, 0)),
    ],
)
def test_np214_on_records(norm: dict[str, Any], sites: Any, outcome: tuple[int, int]) -> None:
    branches = (b.branch("blocks.0", kind="attention"), b.branch("blocks.1"))
    document = b.document(norms=(b.norm(**norm),), streams=(b.stream(branches=branches),), attention=sites)
    assert tuple(map(len, run(document, [find("NP214")]))) == outcome
