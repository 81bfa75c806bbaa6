"""Residual paths that are not one plain trunk: what they are is said, and their branches are read as in plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.records import Anatomy, Stream
from normprobe.report.render import document
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, COPIES, DEPTH = 8, 4, 3


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        out: Tensor = self.o(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])
        return out


class MLP(nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))


class Block(nn.Module):
    """A pre-norm block; its subclasses put its two branches on other kinds of paths."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out

    def branches(self) -> list[Callable[[Tensor], Tensor]]:
        return [lambda x: self.attention(self.norm1(x)), lambda x: self.mlp(self.norm2(x))]


class StaticCopies(Block):
    """Hyper-connections with learned constants (batch, tokens, copies, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(COPIES).repeat(2, 1, 1) + 0.1 * torch.randn(2, COPIES, COPIES))
        self.read, self.write = nn.Parameter(torch.randn(2, COPIES)), nn.Parameter(torch.randn(2, COPIES, 1))

    def forward(self, x: Tensor) -> Tensor:
        for i, branch in enumerate(self.branches()):
            out = branch(torch.einsum("n,btnd->btd", self.read[i], x))
            x = torch.einsum("nm,btnd->btmd", self.mix[i], x) + self.write[i] * out[:, :, None]
        return x


class DynamicCopies(Block):
    """Hyper-connections whose weights each token makes from its normed copies."""

    def __init__(self) -> None:
        super().__init__()
        self.control = nn.ModuleList(nn.Linear(COPIES * WIDTH, 2 * COPIES + COPIES**2) for _ in range(2))
        self.normed = nn.RMSNorm(COPIES * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for control, branch in zip(self.control, self.branches(), strict=True):
            read, write, mix = control(self.normed(x.flatten(2))).split([COPIES, COPIES, COPIES**2], -1)
            out = branch((read.sigmoid()[..., None] * x).sum(2))
            mixed = mix.unflatten(-1, (COPIES, COPIES)).softmax(-1) @ x
            x = mixed + 2 * write.sigmoid()[..., None] * out[:, :, None]
        return x


class MixedLast(DynamicCopies):
    """The mixture is made after what the branch gives."""

    def forward(self, x: Tensor) -> Tensor:
        for control, branch in zip(self.control, self.branches(), strict=True):
            read, write, mix = control(self.normed(x.flatten(2))).split([COPIES, COPIES, COPIES**2], -1)
            out = branch((read.sigmoid()[..., None] * x).sum(2))
            x = 2 * write.sigmoid()[..., None] * out[:, :, None] + mix.unflatten(-1, (COPIES, COPIES)).softmax(-1) @ x
        return x


class Corrected(Block):
    """Copies (copies, batch, tokens, width) of which one goes through the block and corrects the others."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.share = nn.Parameter(torch.randn(COPIES, COPIES)), nn.Parameter(torch.randn(COPIES, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        predicted = torch.einsum("nm,nbtd->mbtd", self.mix, x) + x
        out: Tensor = predicted + self.share * (super().forward(predicted[0]) - predicted[0])
        return out


class Reversible(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        attention, mlp = self.branches()
        one = one + attention(two)
        return torch.cat([one, two + mlp(one)], -1)


class Highway(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for gate, branch in zip(self.gates, self.branches(), strict=True):
            carried = torch.sigmoid(gate(x))
            x = carried * x + (1 - carried) * branch(x)
        return x


class GatedByBranch(Highway):
    """The gate is made from what the branch gives, as in gated residual networks."""

    def forward(self, x: Tensor) -> Tensor:
        for gate, branch in zip(self.gates, self.branches(), strict=True):
            y = branch(x)
            carried = torch.sigmoid(gate(y))
            x = carried * x + (1 - carried) * y
        return x


class GRU(nn.Module):
    """A recurrent unit in place of the add: its state is the trunk, its input what the branch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.reset, self.update, self.new = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.reset_y, self.update_y, self.new_y = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reset = torch.sigmoid(self.reset_y(y) + self.reset(x))
        update = torch.sigmoid(self.update_y(y) + self.update(x) - 2)
        return (1 - update) * x + update * torch.tanh(self.new_y(y) + self.new(reset * x))


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(GRU() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for unit, branch in zip(self.units, self.branches(), strict=True):
            x = unit(x, branch(x).relu())
        return x


class Net(nn.Module):
    """`enter` and `leave` make copies of the embeddings and one stream of the copies."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        enter: Callable[[Tensor], Tensor] = lambda x: x,
        leave: Callable[[Tensor], Tensor] = lambda x: x,
        join: Callable[[Tensor, list[Tensor]], Tensor] = lambda x, states: x,
    ) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.enter, self.leave, self.join = enter, leave, join

    def forward(self, ids: Tensor) -> Tensor:
        states = [self.enter(self.embed(ids))]
        for block in self.blocks:
            states.append(block(self.join(states[-1], states)))
        out: Tensor = self.head(self.norm(self.leave(states[-1])))
        return out


def read(model: nn.Module) -> Anatomy:
    torch.manual_seed(0)
    return anatomy_of(model, torch.randint(0, 16, (2, 7)))


def check_branches(stream: Stream) -> None:
    """The stream holds the attention and the MLP of every block, each behind its own norm."""
    assert (stream.placement, stream.final_norm, stream.depth) == ("pre", "norm", 2 * DEPTH)
    for i, (attention, mlp) in enumerate(zip(stream.branches[::2], stream.branches[1::2], strict=True)):
        assert (attention.kind, attention.pre_norm) == ("attention", f"blocks.{i}.norm1")
        assert set(attention.readers) == {f"blocks.{i}.attention.{name}.weight" for name in "qkv"}
        assert attention.writers == (f"blocks.{i}.attention.o.weight",)
        assert (mlp.kind, mlp.pre_norm) == ("mlp", f"blocks.{i}.norm2")
        assert set(mlp.writers) == {f"blocks.{i}.mlp.2.weight", f"blocks.{i}.mlp.2.bias"}


@pytest.mark.parametrize(
    ("block", "axis"),
    [(StaticCopies, 2), (DynamicCopies, 2), (MixedLast, 2), (Corrected, 0)],
    ids=["static", "dynamic", "mixed last", "corrected"],
)
def test_parallel_streams(block: Callable[[], nn.Module], axis: int) -> None:
    anatomy = read(Net(block, lambda x: torch.stack([x] * COPIES, axis), lambda x: x.mean(axis)))
    stream = only_stream(anatomy)
    assert (stream.topology, stream.copies) == ("parallel_streams", COPIES)
    check_branches(stream)
    others = {n.path for n in anatomy.norms if n.role not in ("pre", "final")}
    assert all(path.endswith(".normed") for path in others)
    assert {n.role for n in anatomy.norms if n.path in others} <= {"inner"}


def test_copies_that_weights_draw_into_one_at_the_end_are_no_writes() -> None:
    class Unembedded(Net):
        def __init__(self) -> None:
            super().__init__(lambda: Corrected(), lambda x: torch.stack([x] * COPIES), lambda x: self.mean(x))
            self.draw = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COPIES - 1))

        def mean(self, x: Tensor) -> Tensor:
            size = x[0].square().mean(-1, keepdim=True).sqrt()
            drawn = [draw(x[i + 1]) for i, draw in enumerate(self.draw)]
            return torch.stack([x[0], *(d * size / d.square().mean(-1, keepdim=True).sqrt() for d in drawn)]).mean(0)

    stream = only_stream(read(Unembedded()))
    assert (stream.topology, stream.copies) == ("parallel_streams", COPIES)
    check_branches(stream)


def test_layers_that_share_keys_attend_to_their_own_sequence() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))
            self.q, self.o = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)) for _ in range(2))
            self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            x, kept = self.embed(ids), None
            for norm, q, o in zip(self.norms, self.q, self.o, strict=True):
                y = norm(x)
                kept = kept or (self.k(y)[:, None], self.v(y)[:, None])
                x = x + o(F.scaled_dot_product_attention(q(y)[:, None], *kept)[:, 0])
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    anatomy = read(Shared())
    branches = only_stream(anatomy).branches
    assert [b.kind for b in branches] == ["attention"] * DEPTH
    assert not any(site.cross for site in anatomy.attention)
    for i, branch in enumerate(branches):
        assert set(branch.readers) == {f"{name}.{end}" for name in (f"q.{i}", "k", "v") for end in ("weight", "bias")}


@pytest.mark.parametrize("cut", [True, False], ids=["joined after each block", "two tensors"])
def test_reversible(cut: bool) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(Block() for _ in range(DEPTH))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

        def forward(self, ids: Tensor) -> Tensor:
            one = two = self.embed(ids)
            for block in self.blocks:
                one = one + block.attention(block.norm1(two))
                two = two + block.mlp(block.norm2(one))
            out: Tensor = self.head(self.norm(one + two))
            return out

    anatomy = read(Net(Reversible) if cut else Pair())
    first, second = anatomy.streams
    assert first.topology == second.topology == "reversible"
    assert first.final_norm == second.final_norm == "norm"
    assert [(b.kind, b.placement, b.pre_norm) for b in first.branches] == [
        ("attention", "pre", f"blocks.{i}.norm1") for i in range(DEPTH)
    ]
    assert [(b.kind, b.placement, b.pre_norm) for b in second.branches] == [
        ("mlp", "pre", f"blocks.{i}.norm2") for i in range(DEPTH)
    ]


@pytest.mark.parametrize("block", [Highway, GatedByBranch])
def test_highway(block: type[Block]) -> None:
    stream = only_stream(read(Net(block)))
    assert (stream.topology, {b.branch_scale.kind for b in stream.branches}) == ("gated", {"gate"})
    assert {b.skip_scale for b in stream.branches} == {None}
    check_branches(stream)


def test_a_recurrent_unit_in_place_of_the_add() -> None:
    stream = only_stream(read(Net(Recurrent)))
    assert (stream.topology, stream.placement, stream.depth) == ("gated", "pre", 2 * DEPTH)
    assert [b.kind for b in stream.branches] == ["attention", "mlp"] * DEPTH
    assert {(b.skip, b.branch_scale.kind) for b in stream.branches} == {("gate", "gate")}
    assert [b.pre_norm for b in stream.branches[:2]] == ["blocks.0.norm1", "blocks.0.norm2"]


def test_a_gated_cell_along_the_tokens_is_no_stream() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.new = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            state = x[:, 0]
            for token in x.unbind(1):
                both = torch.cat([state, token], -1)
                z = torch.sigmoid(self.gate(both))
                state = z * state + (1 - z) * torch.tanh(self.new(both))
            return state

    assert not anatomy_of(Recurrent(), torch.randn(2, 7, WIDTH)).streams


@pytest.mark.parametrize(
    "join",
    [
        lambda x, states: 0.9 * x + 0.1 * states[0],
        lambda x, states: sum(0.3 * s for s in states),
        lambda x, states: torch.einsum("n,nbtd->btd", torch.ones(len(states)), torch.stack(states)),
    ],
    ids=["the embeddings again", "weighted average over depth", "average of a stack"],
)
def test_earlier_states_added_again(join: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
    stream = only_stream(read(Net(Block, join=join)))
    assert stream.topology == "long_skips"
    check_branches(stream)


@pytest.mark.parametrize("normed", [False, True], ids=["drawn into one", "normed before"])
def test_earlier_states_put_beside_and_drawn_into_one(normed: bool) -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(Block() for _ in range(5))
            self.draw = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
            self.beside = nn.ModuleList(nn.LayerNorm(2 * WIDTH) if normed else nn.Identity() for _ in range(2))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

        def forward(self, ids: Tensor) -> Tensor:
            x, kept = self.embed(ids), []
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i < 2:
                    kept.append(x)
                elif kept:
                    x = self.draw[i - 2](self.beside[i - 2](torch.cat([x, kept.pop()], -1)))
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    stream = only_stream(read(Folded()))
    assert (stream.topology, stream.depth, stream.placement, stream.final_norm) == ("long_skips", 10, "pre", "norm")
    assert {b.skip for b in stream.branches} == {"identity"}


def test_a_plain_stream_is_ordinary() -> None:
    stream = only_stream(read(Net(Block)))
    assert (stream.topology, stream.copies) == ("ordinary", 1)
    check_branches(stream)


def test_a_skip_from_the_norm_leaves_the_trunk_where_it_is() -> None:
    class LowRank(Block):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.norm3 = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)), nn.RMSNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm1(x)
            x = (x + self.attention(normed) + normed + self.norm3(self.low(normed))) / 2**0.5
            return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    branches = only_stream(read(Net(LowRank))).branches
    assert [(b.kind, b.placement, b.parallel) for b in branches[:3]] == [
        ("attention", "pre", True),
        ("mlp", "sandwich", True),
        ("mlp", "pre", False),
    ]
    assert [b.pre_norm for b in branches[:3]] == ["blocks.0.norm1", "blocks.0.norm1", "blocks.0.norm2"]


def test_unusual_paths_are_healthy_and_shown() -> None:
    torch.manual_seed(0)
    model = Net(DynamicCopies, lambda x: x[:, :, None].repeat(1, 1, COPIES, 1), lambda x: x.sum(2))
    report = normprobe.probe(model, torch.randint(0, 16, (2, 7)))
    assert not report.findings
    assert "4 parallel streams" in document(report, "rich")


def test_features_of_an_inner_layer_are_said() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            states = [x]
            for block in self.blocks:
                states.append(block(states[-1]))
            return self.head(states[-2]), states[-1]

    report = normprobe.probe(Tower(), torch.randn(2, 7, WIDTH), level="structure")
    stream = only_stream(report.anatomy)
    assert (stream.final_norm, stream.needs_final_norm) == (None, None)
    assert stream.final_norm_reason.startswith("the first output takes features at an inner layer")
    assert not report.findings


def test_a_branch_on_some_tokens_is_a_branch() -> None:
    class First(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            normed = self.norm2(x)
            return x + torch.cat([self.mlp(normed[:, :1]), normed[:, 1:]], 1)

    stream = only_stream(read(Net(First)))
    assert (stream.topology, stream.depth) == ("ordinary", 2 * DEPTH)


def test_a_concatenation_that_is_read_as_a_whole_is_not_taken_apart() -> None:
    class Normed(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            x = torch.cat([self.norm2(x[:, :1]), x[:, 1:]], 1)
            return x + torch.cat([self.mlp(x[:, :1]), x[:, 1:]], 1)

    (stream,) = read(Net(Normed)).streams
    assert stream.depth == 2 * DEPTH


def test_tokens_that_also_see_a_few_global_ones_attend_to_themselves() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in "qkvo")

        def forward(self, x: Tensor, few: Tensor) -> Tensor:
            h = self.norm(x)
            q, (k, v), (key, value) = self.q(h), (self.k(h), self.v(h)), (self.k(few), self.v(few))
            weights = torch.cat([q @ key.transpose(1, 2), q @ k.transpose(1, 2)], -1).softmax(-1)
            out = weights[..., : few.shape[1]] @ value + weights[..., few.shape[1] :] @ v
            return x + self.o(out)  # type: ignore[no-any-return]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Local() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            few = self.few(x[:, :2])
            for block in self.blocks:
                x = block(x, few)
            return self.norm(x)  # type: ignore[no-any-return]

    stream = only_stream(anatomy_of(Both(), torch.randn(2, 7, WIDTH)))
    assert {b.kind for b in stream.branches} == {"attention"}
