"""Learned tokens are read as the signal they are: queries of a decoder, latents, also where they begin as zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.records import Branch
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8


class Attention(nn.Module):
    """One head, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        logits = self.q(x) @ self.k(keys).transpose(-1, -2) / WIDTH**0.5
        return self.out(logits.softmax(-1) @ self.v(values))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Post-norm: self-attention over the tokens, cross-attention to the memory, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, places: Tensor, memory: Tensor) -> Tensor:
        x = self.norms[0](x + self.own(x + places, x + places, x))
        x = self.norms[1](x + self.cross(x + places, memory, memory))
        return self.norms[2](x + self.down(F.relu(self.up(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens that begin as zeros with learned places, or as learned ones, also with places read off the memory; the
    places are returned first."""

    def __init__(self, zeros: bool, read: bool = False) -> None:
        super().__init__()
        self.where = nn.Linear(WIDTH, WIDTH) if read else None
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.places, self.start = nn.Embedding(3, WIDTH), nn.Parameter(torch.randn(1, 3, WIDTH))
        self.zeros, self.box, self.head = zeros, nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 5)

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        places = self.places.weight.unsqueeze(0).repeat(memory.shape[0], 1, 1)
        x = torch.zeros_like(places) if self.zeros else self.start.expand_as(places)
        places = places if self.where is None else self.where(memory[:, :3])
        for layer in self.layers:
            x = layer(x, places, memory)
        return self.box(places), self.head(x)


def layer_facts(branches: tuple[Branch, ...]) -> list[tuple[str, str, str, str | None]]:
    return [(b.block, b.kind, b.placement, b.post_norm) for b in branches]


def test_learned_tokens_are_a_stream_from_their_first_layer_on() -> None:
    kinds = "attention", "cross_attention", "mlp"
    facts = [(f"layers.{i}", kind, "post", f"layers.{i}.norms.{j}") for i in range(2) for j, kind in enumerate(kinds)]
    for zeros, read in ((True, False), (False, False), (False, True)):
        anatomy = anatomy_of(Decoder(zeros, read), torch.randn(2, 6, WIDTH))
        assert layer_facts(only_stream(anatomy).branches) == facts
        assert only_stream(anatomy).final_norm_reason == "the last write is normed itself"
        assert [a.path for a in anatomy.attention] == [f"layers.{i}.{n}" for i in range(2) for n in ("own", "cross")]


class Relative(nn.Module):
    """Pre-norm attention whose logits also take projected learned places: these are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.places, self.r, self.out = nn.Parameter(torch.randn(1, 6, WIDTH)), *(nn.Linear(WIDTH, WIDTH),) * 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        logits = self.q(h) @ self.k(h).transpose(-1, -2) + self.q(h) @ self.r(self.places).transpose(-1, -2)
        return x + self.out(logits.softmax(-1) @ self.v(h))  # type: ignore[no-any-return]


def test_projected_places_are_no_tokens() -> None:
    anatomy = anatomy_of(nn.Sequential(Relative(), Relative()), torch.randn(2, 6, WIDTH))
    assert [b.placement for b in only_stream(anatomy).branches] == ["pre", "pre"]
    assert [(a.columns["k"].parameter, a.biased) for a in anatomy.attention] == [
        ("0.k.weight", True),
        ("1.k.weight", True),
    ]


class Sampling(nn.Module):
    """Deformable attention: each token samples the map at places that it computes, weighed by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.places = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.weights, self.out = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        value = self.value(memory).transpose(1, 2).reshape(x.shape[0], WIDTH, 2, 3)
        places = self.places(x).tanh().reshape(x.shape[0], x.shape[1], 4, 2)
        found = F.grid_sample(value, places, align_corners=False) * self.weights(x).softmax(-1)[:, None]
        return self.out(found.sum(-1).transpose(1, 2))  # type: ignore[no-any-return]


class Deformable(nn.Module):
    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.tokens, self.cross = nn.Parameter(torch.randn(1, 6, WIDTH)), cross
        self.sampling = nn.ModuleList(Sampling() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, memory: Tensor) -> Tensor:
        x = self.tokens.expand_as(memory) if self.cross else memory
        for norm, sampling in zip(self.norms, self.sampling, strict=False):
            x = norm(x)
            x = x + sampling(x, memory if self.cross else x)
        return self.norms[2](x)  # type: ignore[no-any-return]


def test_sampling_is_attention() -> None:
    for cross in (True, False):
        stream = only_stream(anatomy_of(Deformable(cross), torch.randn(2, 6, WIDTH)))
        assert [b.kind for b in stream.branches] == ["cross_attention" if cross else "attention"] * 2


def test_a_class_token_that_alone_reads_the_others_is_a_stream_from_its_first_write_on() -> None:
    class Collect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

        def forward(self, token: Tensor, x: Tensor) -> Tensor:
            all_tokens = self.norm1(torch.cat([token, x], 1))
            token = token + self.attention(all_tokens[:, :1], all_tokens, all_tokens)
            return token + self.mlp(self.norm2(token))  # type: ignore[no-any-return]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.enter = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, WIDTH)
            self.blocks, self.norm = nn.ModuleList(Collect() for _ in range(2)), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x, token = self.enter(x), self.token.expand(x.shape[0], -1, -1)
            for block in self.blocks:
                token = block(token, x)
            return self.norm(token)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    stream = only_stream(anatomy_of(Net(), torch.randn(2, 5, WIDTH)))
    assert [(b.kind, b.placement) for b in stream.branches] == [("attention", "pre"), ("mlp", "pre")] * 2
    assert (stream.input_multiplier, stream.final_norm) == (1.0, "norm")
    assert stream.branches[0].pre_norm == "blocks.0.norm1"
