"""The kind of a branch is told by whether and how it mixes tokens, not by the operations that it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.anatomy.attention import kernels
from normprobe.records import Anatomy
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, INNER, TOKENS = 16, 24, 6
Inside = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """x + down(inside(block, up(norm(x)))): `inside` says what stands between the two projections."""

    def __init__(self, inside: Inside, wide: int = INNER, into: int = INNER) -> None:
        super().__init__()
        self.inside, self.norm = inside, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(into, WIDTH)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inside(self, self.up(self.norm(x))))  # type: ignore[no-any-return]


def read(block: nn.Module) -> Anatomy:
    return anatomy_of(nn.Sequential(block, block), torch.randn(2, TOKENS, WIDTH))


def top_channels(_: nn.Module, h: Tensor) -> Tensor:
    values, places = h.topk(8, -1)
    return torch.zeros_like(h).scatter(-1, places, values.relu())


def masked_channels(_: nn.Module, h: Tensor) -> Tensor:
    return h * F.one_hot(h.topk(8, -1).indices, INNER).sum(-2)


def running_sum(_: nn.Module, h: Tensor) -> Tensor:
    return F.gelu(h).cumsum(-1)


def grouped(block: nn.Module, h: Tensor) -> Tensor:
    """Groups of channels one after the other, each with what became of the one before."""
    groups, state, found = h.unflatten(-1, (6, 4)), torch.zeros(()), []
    for i in range(6):
        state = F.gelu(block.mix(groups[..., i, :] + state))
        found.append(state)
    return torch.cat(found, -1)


def outer(_: nn.Module, h: Tensor) -> Tensor:
    """Each token's products of some features with others."""
    left, right = h.split([4, 20], -1)
    return (left.unsqueeze(-1) @ right[..., :6].unsqueeze(-2)).flatten(-2)


def own_weights(_: nn.Module, h: Tensor) -> Tensor:
    """Each token is multiplied by a matrix that is made of it."""
    left, matrix = h.relu().split([4, 20], -1)
    made = left.unsqueeze(-2) @ torch.cat((matrix, matrix[..., :4]), -1).unflatten(-1, (4, 6))
    return made.squeeze(-2).repeat(1, 1, 4)


@pytest.mark.parametrize("inside", [top_channels, masked_channels, running_sum, grouped, outer, own_weights])
def test_what_acts_on_every_token_alone_is_an_mlp(inside: Inside) -> None:
    assert [b.kind for b in only_stream(read(Block(inside))).branches] == ["mlp"] * 2


@torch.library.custom_op("normprobe_kinds::flash_attention_gate", mutates_args=())
def flash_attention_gate(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """An operation of another library whose name says nothing of what it does."""
    return a * b.sigmoid() + c


@torch.library.custom_op("normprobe_kinds::mix", mutates_args=())
def mix(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Attention over the second axis."""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (a, b, c))).transpose(1, 2).contiguous()


@torch.library.custom_op("normprobe_kinds::sums", mutates_args=())
def sums(a: Tensor) -> Tensor:
    return a.cumsum(1)


@torch.library.custom_op("normprobe_kinds::product", mutates_args=())
def product(a: Tensor, weight: Tensor) -> Tensor:
    return a @ weight.T


@torch.library.custom_op("normprobe_kinds::drop", mutates_args=())
def drop(a: Tensor) -> Tensor:
    return F.dropout(a, 0.5)


@torch.library.custom_op("normprobe_kinds::mix_into", mutates_args=("out",))
def mix_into(a: Tensor, b: Tensor, c: Tensor, out: Tensor) -> None:
    out.copy_(F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (a, b, c))).transpose(1, 2))


@torch.library.custom_op("normprobe_kinds::elsewhere", mutates_args=(), device_types="cuda")
def elsewhere(a: Tensor) -> Tensor:
    """An operation without a kernel for the processor."""
    return a.cumsum(1)


@elsewhere.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


@drop.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def written_attention(_: nn.Module, h: Tensor) -> Tensor:
    q, k, v = heads(h)
    made = torch.empty_like(q)
    mix_into(q, k, v, made)
    return made.flatten(2)


KERNELS: dict[str, tuple[Inside, str]] = {
    "each token alone": (lambda _, h: flash_attention_gate(*h.chunk(3, -1)), "mlp"),
    "attention": (lambda _, h: mix(*heads(h)).flatten(2), "attention"),
    "attention into a given tensor": (written_attention, "attention"),
    "of another kind": (lambda _, h: sums(h[..., :8].contiguous()), "other"),
    "at random": (lambda _, h: drop(h[..., :8].contiguous()), "mlp"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_operations_of_other_libraries_are_told_by_what_they_do(name: str) -> None:
    inside, kind = KERNELS[name]
    assert [b.kind for b in only_stream(read(Block(inside, into=8))).branches] == [kind] * 2


class Products(nn.Module):
    """An MLP of which every product is an operation of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Parameter(torch.randn(INNER, WIDTH)), nn.Parameter(torch.randn(WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        return x + product(F.gelu(product(self.norm(x), self.up)), self.down)  # type: ignore[no-any-return]


def test_products_of_another_library_make_an_mlp() -> None:
    assert [b.kind for b in only_stream(read(Products())).branches] == ["mlp"] * 2


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (lambda _, h: elsewhere(h), "could not be run on random numbers (NotImplementedError"),
        (lambda _, h: drop(h), "reads more than 64 numbers"),
    ],
)
def test_an_operation_that_cannot_be_run_leaves_the_kind_unknown(
    monkeypatch: pytest.MonkeyPatch, inside: Inside, why: str
) -> None:
    if "64" in why:
        monkeypatch.setattr(kernels, "_LARGEST", 64)
    block = Block(inside).to("meta")
    report = normprobe.probe(block, torch.empty(1, TOKENS, WIDTH, device="meta"), level="structure")
    assert [b.kind for b in only_stream(report.anatomy).branches] == ["other"]
    (skipped,) = [s for s in report.skipped if s.what.startswith("kind of the branch")]
    assert skipped.what.startswith("kind of the branch with normprobe_kinds.")
    assert why in skipped.why


def heads(h: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value, (batch, tokens, heads, features) each."""
    return tuple(t.unflatten(-1, (2, 4)) for t in h.chunk(3, -1))


def covariance(_: nn.Module, h: Tensor) -> Tensor:
    """Each channel weighs the channels of its head by their products over all tokens."""
    q, k, v = (t.permute(0, 2, 3, 1) for t in heads(h))
    weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1)
    return (weights @ v).permute(0, 3, 1, 2).flatten(2)


def fused_covariance(_: nn.Module, h: Tensor) -> Tensor:
    q, k, v = (t.permute(0, 2, 3, 1) for t in heads(h))
    return F.scaled_dot_product_attention(q, k, v).permute(0, 3, 1, 2).flatten(2)


@pytest.mark.parametrize("inside", [covariance, fused_covariance])
def test_channels_that_weigh_channels_are_no_attention_over_tokens(inside: Inside) -> None:
    anatomy = read(Block(inside, into=8))
    assert [b.kind for b in only_stream(anatomy).branches] == ["linear_attention"] * 2
    assert not anatomy.attention


def among_heads(_: nn.Module, h: Tensor) -> Tensor:
    """The heads of one token weigh each other."""
    q, k, v = heads(h)
    return F.scaled_dot_product_attention(q, k, v).flatten(2)


def among_written_heads(_: nn.Module, h: Tensor) -> Tensor:
    q, k, v = heads(h)
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).flatten(2)


@pytest.mark.parametrize("inside", [among_heads, among_written_heads])
def test_parts_of_one_token_that_weigh_each_other_are_an_mlp(inside: Inside) -> None:
    anatomy = read(Block(inside, into=8))
    assert [b.kind for b in only_stream(anatomy).branches] == ["mlp"] * 2
    assert not anatomy.attention


def over_tokens(_: nn.Module, h: Tensor) -> Tensor:
    return F.gelu(h).cumsum(1)


def in_chunks(_: nn.Module, h: Tensor) -> Tensor:
    """Summed up within chunks of four tokens, zeros put beside the last."""
    chunks = F.pad(F.gelu(h).transpose(1, 2), (0, 2)).unflatten(-1, (2, 4)).cumsum(-1)
    return chunks.flatten(2)[..., :TOKENS].transpose(1, 2)


def loop(block: nn.Module, h: Tensor) -> Tensor:
    state, found = torch.zeros(()), []
    for i in range(TOKENS):
        state = torch.tanh(h[:, i] + state)
        found.append(state)
    return torch.stack(found, 1)


def loop_of_columns(block: nn.Module, h: Tensor) -> Tensor:
    """The tokens are columns, and the weights come first."""
    columns = torch.bmm(block.up.weight.T.expand(len(h), -1, -1), h.transpose(1, 2))
    state, found = torch.zeros(()), []
    for i in range(TOKENS):
        state = torch.tanh(columns[..., i, None] + state)
        found.append(state)
    return torch.cat(found, -1).transpose(1, 2)


def summary(_: nn.Module, h: Tensor) -> Tensor:
    q, k, v = h.chunk(3, -1)
    return q @ (k.transpose(-2, -1) @ v)


@pytest.mark.parametrize(
    ("inside", "kind", "into"),
    [
        (over_tokens, "recurrent", INNER),
        (in_chunks, "recurrent", INNER),
        (loop, "recurrent", INNER),
        (loop_of_columns, "recurrent", WIDTH),
        (summary, "linear_attention", 8),
    ],
)
def test_the_same_operations_along_the_tokens_mix_them(inside: Inside, kind: str, into: int) -> None:
    assert [b.kind for b in only_stream(read(Block(inside, into=into))).branches] == [kind] * 2


class OnMap(nn.Module):
    """Attention over the places of a map; a rectifier and a projection over its channels follow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(1, WIDTH), nn.Conv2d(WIDTH, 2 * 8 + WIDTH, 1)
        self.proj = nn.Sequential(nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).split([8, 8, WIDTH], 1)
        weights = (q.transpose(-2, -1) @ k).softmax(-1)
        return x + self.proj((v @ weights.transpose(-2, -1)).unflatten(-1, x.shape[2:]))  # type: ignore[no-any-return]


def test_an_activation_behind_attention_weighs_no_tokens() -> None:
    anatomy = anatomy_of(nn.Sequential(OnMap(), OnMap(), OnMap()), torch.randn(2, WIDTH, 3, 4))
    assert [b.kind for b in only_stream(anatomy).branches] == ["attention"] * 3
    assert [a.kernel for a in anatomy.attention] == ["aten._softmax"] * 3


class Neighbours(nn.Module):
    """An MLP and a short causal convolution of each channel behind it, with a skip of its own or without."""

    def __init__(self, skip: bool, mlp: bool = True) -> None:
        super().__init__()
        self.skip, self.norm = skip, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) if mlp else nn.Identity()
        self.short = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        mixed = self.short(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + (h + mixed if self.skip else mixed)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("block", "kind"),
    [(Neighbours(True), "mlp"), (Neighbours(False), "conv"), (Neighbours(True, mlp=False), "conv")],
)
def test_a_little_of_the_neighbours_makes_no_convolution_of_an_mlp(block: nn.Module, kind: str) -> None:
    assert [b.kind for b in only_stream(read(block)).branches] == [kind] * 2


class GroupedExperts(nn.Module):
    """Experts of the best group alone are chosen from, and their weights are gathered for each token (DeepSeek-V3)."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(6, *size)) for size in ((WIDTH, INNER), (INNER, WIDTH)))
        self.shared = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        tokens = h.flatten(0, -2)
        scores = self.router(tokens).sigmoid()
        groups = scores.unflatten(-1, (3, 2)).topk(2, -1)[0].sum(-1).topk(2, -1)[1]
        kept = torch.zeros(len(tokens), 3).scatter(1, groups, 1.0)[:, :, None].expand(-1, -1, 2).flatten(1)
        best = scores.masked_fill(kept == 0, 0.0).topk(2, -1)[1]
        weights = scores.gather(1, best)
        each = tokens[:, None].expand(-1, 2, -1).flatten(0, 1)[:, None]
        out = (each @ self.up[best.flatten()]).relu() @ self.down[best.flatten()]
        out = (out.view(len(tokens), 2, WIDTH) * weights[..., None]).sum(1).view(x.shape)
        return x + (out if self.shared is None else out + self.shared(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("shared", [False, True])
def test_a_choice_among_groups_before_that_of_experts_leaves_it_a_choice(shared: bool) -> None:
    assert [b.kind for b in only_stream(read(GroupedExperts(shared))).branches] == ["moe"] * 2
