"""Adds, weights, masks, outputs and wrappers of less usual forms are read as what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.records import Anatomy

WIDTH = 8
Sum = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One pre-norm branch; `merge(x, branch)` adds it."""

    def __init__(self, merge: Sum = torch.add) -> None:
        super().__init__()
        self.norm, self.write, self.merge = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), merge

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(x, self.write(self.norm(x)))


class Net(nn.Module):
    """Blocks, a final norm and a head; `give(stream, normed, logits)` is what it returns."""

    def __init__(self, block: Callable[[], nn.Module] = Block, give: Callable[..., Any] = lambda x, n, y: y) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.final, self.head, self.give = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), give

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x) if mask is None else block(x) * mask[..., None]
        normed = self.final(x)
        return self.give(x, normed, self.head(normed))


def anatomy(model: nn.Module, *inputs: Tensor) -> Anatomy:
    torch.manual_seed(0)
    return normprobe.probe(model, inputs or (torch.randn(2, 3, WIDTH),), level="structure").anatomy


@pytest.mark.parametrize(
    ("merge", "skip", "scale"),
    [
        (lambda x, f: torch.add(x, f, alpha=0.5), 1.0, 0.5),
        (lambda x, f: torch.add(f, x, alpha=3), 3.0, None),
        (lambda x, f: x - f, 1.0, None),
        (lambda x, f: torch.rsub(f, x, alpha=0.5), 1.0, 0.5),
        (lambda x, f: torch.lerp(x, f, 0.25), 0.75, 0.25),
        (lambda x, f: 2 * x + f / 4, 2.0, 0.25),
    ],
    ids=["alpha", "alpha on the trunk", "difference", "rsub", "lerp", "written out"],
)
def test_constant_factors_of_an_add(merge: Sum, skip: float, scale: float | None) -> None:
    for branch in anatomy(Net(lambda: Block(merge))).streams[0].branches:
        assert branch.skip_scale == pytest.approx(skip)
        assert branch.branch_scale.value == (None if scale is None else pytest.approx(scale))
        assert branch.branch_scale.kind == ("none" if scale is None else "constant")


def test_fused_multiply_add_is_an_add_with_a_channel_scale() -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addcmul(x, self.gamma, self.write(self.norm(x)))

    branches = anatomy(Net(Scaled)).streams[0].branches
    assert [(b.branch_scale.kind, b.branch_scale.parameter) for b in branches] == [
        ("channel", f"blocks.{i}.gamma") for i in range(3)
    ]


def test_weights_kept_as_buffers_are_readers_and_writers() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.register_buffer("weight", torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(x) @ self.weight.t()

    (stream,) = anatomy(Net(Held)).streams
    assert [b.writers for b in stream.branches] == [(f"blocks.{i}.weight",) for i in range(3)]


def test_a_mask_of_floats_does_not_break_the_stream() -> None:
    (stream,) = anatomy(Net(), torch.randn(2, 3, WIDTH), torch.ones(2, 3)).streams
    assert (stream.depth, stream.placement, stream.final_norm) == (3, "pre", "final")


@pytest.mark.parametrize(
    "give",
    [
        lambda x, n, y: (torch.ones(2), y),
        lambda x, n, y: {"features": x, "logits": y},
        lambda x, n, y: (y.sum(), y),
        lambda x, n, y: [[n], {"deep": y}],
    ],
    ids=["count first", "raw features first", "loss first", "nested"],
)
def test_the_head_is_the_way_to_the_logits(give: Callable[..., Any]) -> None:
    found = anatomy(Net(give=give))
    assert found.head is not None
    assert found.head.path == "head.weight"
    assert found.streams[0].final_norm == "final"


def test_an_earlier_projection_beside_the_first_output_is_no_head() -> None:
    class Tower(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            stem = x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.final(x), stem

    found = anatomy(Tower())
    assert (found.head, found.streams[0].final_norm) == (None, "final")


def test_a_pooler_that_ends_in_an_activation_is_no_head() -> None:
    class Pooled(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            for block in self.blocks:
                x = block(x)
            x = self.final(x)
            return {"states": x, "pooled": torch.tanh(self.head(x[:, 0]))}

    found = anatomy(Pooled())
    assert (found.head, found.streams[0].final_norm) == (None, "final")


def test_norm_whose_parameters_a_function_took_is_not_unused() -> None:
    class Functional(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.write(F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias))

    found = anatomy(Net(Functional))
    assert [n.path for n in found.norms if not n.executed] == []
    inline = [n for n in found.norms if not n.module]
    assert [(n.weight, n.bias) for n in inline] == [
        (f"blocks.{i}.norm.weight", f"blocks.{i}.norm.bias") for i in range(3)
    ]


def test_what_else_did_not_run_beside_an_unused_norm_is_told() -> None:
    class Optional(Block):
        def __init__(self) -> None:
            super().__init__()
            self.cross, self.cross_norm = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)
            self.idle, self.drop = nn.LayerNorm(WIDTH), nn.Dropout()

    (unused, other), *_ = zip(*[iter(n for n in anatomy(Net(Optional)).norms if not n.executed)] * 2, strict=True)
    assert (unused.path, unused.idle_beside) == ("blocks.0.cross_norm", ("blocks.0.cross",))
    assert (other.path, other.idle_beside) == ("blocks.0.idle", ("blocks.0.cross",))

    class Projected(Block):
        def __init__(self) -> None:
            super().__init__()
            self.projection, self.idle = nn.Parameter(torch.ones(3, WIDTH)), nn.LayerNorm(WIDTH)

    assert [n.idle_beside for n in anatomy(Net(Projected)).norms if not n.executed][:1] == [("blocks.0.projection",)]

    class Forgotten(Block):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.drop = nn.LayerNorm(WIDTH), nn.Dropout()

    assert {n.idle_beside for n in anatomy(Net(Forgotten)).norms if not n.executed} == {()}


def test_parameters_of_a_written_out_norm_are_told_apart() -> None:
    class Written(Block):
        def __init__(self) -> None:
            super().__init__()
            self.eps, self.gain, self.shift = (nn.Parameter(torch.full(s, 0.5)) for s in ((1,), (WIDTH,), (WIDTH,)))

        def forward(self, x: Tensor) -> Tensor:
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps * 1e-5)
            return x + self.write(normed * self.gain + self.shift)

    inline = [n for n in anatomy(Net(Written)).norms if not n.module]
    assert [(n.weight, n.bias) for n in inline] == [(f"blocks.{i}.gain", f"blocks.{i}.shift") for i in range(3)]


def test_branches_added_in_the_next_norm_belong_to_the_block_of_their_weights() -> None:
    class AddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
            stream = stream + branch
            return self.norm(stream), stream

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(AddNorm() for _ in range(4))
            self.writes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            normed, x = self.norms[0](torch.zeros_like(x), x)
            for norm, write in zip(self.norms[1:], self.writes, strict=True):
                normed, x = norm(write(normed), x)
            return self.head(normed)

    (stream,) = anatomy(Fused()).streams
    assert [(b.block, b.path) for b in stream.branches] == [(f"writes.{i}", f"norms.{i + 1}") for i in range(3)]
    assert stream.final_norm == "norms.3.norm"


def test_features_first_of_a_linear_writer() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(4, 4, 3, padding=1, groups=4)
            self.norm, self.write = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.write(self.norm(self.mix(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    (stream,) = anatomy(nn.Sequential(Turned(), Turned()), torch.randn(2, 4, 5, 6)).streams
    assert (stream.feature_axis, stream.width) == (1, 4)


def test_features_of_a_convolution_behind_a_norm_are_channels() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.write, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.norm(self.write(x)))

    (stream,) = anatomy(nn.Sequential(Residual(), Residual()), torch.randn(2, 4, 5, 6)).streams
    assert (stream.feature_axis, stream.width, stream.placement) == (1, 4, "postact")


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["data", "compile"]
)
def test_wrappers_are_looked_behind(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    assert anatomy(wrap(model)) == anatomy(model)


def test_routed_experts_read_the_same_without_values() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes)
    ids = {"input_ids": torch.randint(1, 64, (2, 6))}
    model = MixtralForCausalLM(config)
    real = normprobe.probe(model, ids, level="structure").anatomy
    bare = normprobe.probe(model.to("meta"), {"input_ids": ids["input_ids"].to("meta")}, level="structure")
    assert [b.kind for b in real.streams[0].branches] == ["attention", "moe"] * 2
    experts = [b.writers for b in real.streams[0].branches if b.kind == "moe"]
    assert all(f"model.layers.{i}.mlp.experts.down_proj" in writers for i, writers in enumerate(experts))
    assert bare.anatomy.streams == real.streams
    assert any("experts ran in" in skip.why for skip in bare.skipped)
    assert config._experts_implementation == MixtralForCausalLM(config).config._experts_implementation


class Attending(nn.Module):
    """Attention written out; `logits(product)` says what becomes of q·kᵀ before the softmax."""

    def __init__(self, logits: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.logits = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), logits
        self.slopes = nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        weights = self.logits(self, q @ k.mT).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))


def test_logits_are_seen_before_the_maximum_of_each_row_is_subtracted() -> None:
    def plain(_: nn.Module, product: Tensor) -> Tensor:
        return 100 * product

    def stable(_: nn.Module, product: Tensor) -> Tensor:
        product = 100 * product
        return product - product.max(-1, keepdim=True).values

    torch.manual_seed(0)
    models = [Attending(plain), Attending(stable)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 5, WIDTH)
    first, second = (normprobe.probe(m, x).attention[0].heads for m in models)
    assert [h.sampled_max for h in first] == [h.sampled_max for h in second]
    assert max(h.sampled_max for h in first) > 5
    assert not anatomy(models[1], x).attention[0].biased


@pytest.mark.parametrize(
    ("logits", "biased"),
    [
        (lambda m, p: p / 2, False),
        (lambda m, p: p + torch.full((5, 5), -1e9).triu(1), False),
        (lambda m, p: p + m.slopes * torch.arange(5), True),
    ],
    ids=["scaled", "masked", "position bias"],
)
def test_a_position_bias_is_told_from_a_mask(logits: Callable[[nn.Module, Tensor], Tensor], biased: bool) -> None:
    (site,) = anatomy(Attending(logits), torch.randn(2, 5, WIDTH)).attention
    assert site.biased is biased


def test_a_block_that_runs_again_and_again_is_one_block() -> None:
    class Writer(Block):
        pass

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = Writer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x + self.second(self.norm(x))

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Shared()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x)
            return x

    (stream,) = anatomy(Again()).streams
    assert (stream.depth, {b.block for b in stream.branches}) == (6, {"block"})


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_script_modules_are_said_to_be_unread_and_not_unused() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(2, WIDTH))
    report = normprobe.probe(scripted, torch.randn(2, WIDTH))
    assert "NP208" not in [f.code for f in report.findings]
    assert any("script modules" in skip.why for skip in report.skipped)


def test_experts_of_which_each_token_takes_the_first_choice_are_experts() -> None:
    class FirstChoice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.norm(x).reshape(-1, WIDTH)
            odds = self.router(tokens).softmax(-1)
            ranks = torch.nn.functional.one_hot(odds.argmax(-1), 3)
            ranks = ranks * (ranks.cumsum(0) < 100)  # as a capacity is kept
            out = torch.zeros_like(tokens)
            for i, expert in enumerate(self.experts):
                (chosen,) = torch.nonzero(ranks[:, i], as_tuple=True)
                out = out.index_add(0, chosen, expert(tokens[chosen]) * odds[chosen, i, None])
            return x + out.view_as(x)

    (stream,) = anatomy(nn.Sequential(FirstChoice(), FirstChoice())).streams
    assert [b.kind for b in stream.branches] == ["moe", "moe"]
