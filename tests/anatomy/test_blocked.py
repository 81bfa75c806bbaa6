"""Parameters that are 0 and stay so: held against what some steps of training move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.anatomy.build import read
from normprobe.capture.recorder import record
from tests.models import gpt2

WIDTH, TOKENS = 8, 5


class Attention(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written = written
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.written:
            return self.o((q @ k.mT).softmax(-1) @ v)  # type: ignore[no-any-return]
        return self.o(F.scaled_dot_product_attention(q, k, v))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Its offsets stand on both sides of the product; the gate's activation is written out."""

    def __init__(self, offsets: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        if not offsets:
            for layer in (self.gate, self.up, self.down):
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = 0.5 * gate * (1.0 + torch.tanh(0.8 * (gate + 0.04 * gate**3)))
        return self.scale * self.down(gate * self.up(x))  # type: ignore[no-any-return]


class Rectified(nn.Module):
    """A branch with a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


class Batched(nn.Module):
    """An MLP with a batch norm, which in training makes zeros of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)
        return self.down(nn.functional.gelu(y))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two experts, of which a router chooses one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 2)
        self.up, self.down = (nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.route(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            chosen = choice == number
            y[chosen] = weight[chosen][:, None] * down(F.silu(up(x[chosen])))
        return y


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.pre, self.branch, self.final = nn.LayerNorm(WIDTH), branch, nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.final(x + self.branch(self.pre(x))))  # type: ignore[no-any-return]


def built(branch: str) -> Residual:
    torch.manual_seed(0)
    made = {
        "attention": lambda: Attention(False),
        "written": lambda: Attention(True),
        "gated": lambda: Gated(False),
        "offset": lambda: Gated(True),
        "rectified": Rectified,
        "lifted": Rectified,
        "batched": Batched,
        "experts": Experts,
    }
    model = Residual(made[branch]())
    if branch == "lifted":
        nn.init.normal_(model.pre.bias)
    return model


def unmoved(model: nn.Module, x: Tensor) -> set[str]:
    """The parameters that are still 0 after some steps against targets of chance."""
    model, x = model.double(), x.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        (model(x) - torch.randn(*x.shape[:-1], 3, dtype=x.dtype)).square().sum().backward()
        optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.count_nonzero(p)}


def zeroed(model: nn.Module, names: Sequence[str]) -> nn.Module:
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).zero_()
    return model


def blocked(model: nn.Module, x: Tensor) -> set[str]:
    return set(read(model, record(model, x)).zeros.stay)


BRANCHES = ["attention", "written", "gated", "offset", "rectified", "lifted", "batched", "experts"]


@pytest.mark.parametrize("branch", BRANCHES)
def test_any_two_zeros_stay_where_training_leaves_them(branch: str) -> None:
    """One zero or two, in all pairs of weights and gains: what is named is what training does not move. What chooses
    between experts is left as drawn: an expert without tokens does not move either."""
    chosen = "branch.up branch.down" if branch == "experts" else "pre branch final head"
    plain = [n for n, _ in built(branch).named_parameters() if n.startswith(tuple(chosen.split()))]
    plain = [n for n in plain if not n.endswith("bias")]
    x = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    pairs = [*((n,) for n in plain), *itertools.combinations(plain, 2)]
    stuck = 0
    for names in pairs:
        found = blocked(zeroed(built(branch), names), x)
        held = unmoved(zeroed(built(branch), names), x)
        assert found == held & set(names), names
        stuck += len(found) > 0
    assert 0 < stuck < len(pairs)


def test_a_zero_that_is_not_to_learn_holds_the_others_and_is_not_named() -> None:
    model, x = zeroed(built("attention"), ["branch.k.weight", "branch.o.weight"]), torch.randn(2, TOKENS, WIDTH)
    assert blocked(model, x) == set()
    model.get_parameter("branch.o.weight").requires_grad_(False)
    assert blocked(model, x) == {"branch.k.weight"}


def test_zeros_outside_of_any_branch_stand_at_their_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 3, bias=False))
    zeroed(model, ["0.weight", "2.weight"])
    (finding,) = [f for f in normprobe.probe(model, torch.randn(2, WIDTH)).findings if f.code == "NP606"]
    assert (finding.severity.value, finding.places) == ("error", ("0", "2"))


def test_a_head_of_zeros_opens_by_itself() -> None:
    model, inputs = gpt2(tie_word_embeddings=False)
    model.get_parameter("lm_head.weight").data.zero_()
    assert blocked(model, inputs) == set()
