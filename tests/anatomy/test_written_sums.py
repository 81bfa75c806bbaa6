"""A write is an add however it is written: as a sum over a stack, in one operation with a product, as an
interpolation, by a recurrent unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import Stream
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, DEPTH = 8, 3
Form = Callable[["Block", Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A pre-norm MLP whose result is put together with the trunk by `form`."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.norm, self.form = nn.LayerNorm(WIDTH), form
        self.f = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.gain, self.gate = nn.Parameter(torch.rand(WIDTH) + 1), nn.Linear(WIDTH, WIDTH)
        self.unit, self.choice = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x, self.f(self.norm(x)))

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x))


def net(form: Form) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(form) for _ in range(DEPTH)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))


def stream(form: Form) -> Stream:
    found = only_stream(anatomy_of(net(form), torch.randn(2, 6, WIDTH)))
    assert (found.depth, found.placement, found.final_norm) == (DEPTH, "pre", "2")
    assert [b.pre_norm for b in found.branches] == [f"1.{i}.norm" for i in range(DEPTH)]
    assert {b.kind for b in found.branches} == {"mlp"}
    return found


PLAIN: dict[str, Form] = {
    "stack": lambda b, x, y: torch.stack([x, y]).sum(0),
    "stack on the last axis": lambda b, x, y: torch.stack([y, x], -1).sum(-1),
    "one by one": lambda b, x, y: torch.cat([x[None], y[None]]).sum(0),
    "einsum": lambda b, x, y: torch.einsum("nbtd->btd", torch.stack([x, y])),
    "list": lambda b, x, y: sum([x, y], torch.zeros(())),
}


@pytest.mark.parametrize("form", PLAIN.values(), ids=PLAIN)
def test_plain_sums(form: Form) -> None:
    found = stream(form)
    assert (found.topology, found.input_multiplier) == ("ordinary", 1.0)
    assert {(b.skip_scale, b.branch_scale.kind) for b in found.branches} == {(1.0, "none")}


def test_a_mean_of_a_stack_halves_trunk_and_branch() -> None:
    found = stream(lambda b, x, y: torch.stack([x, y]).mean(0))
    assert {(b.skip_scale, b.branch_scale.value) for b in found.branches} == {(0.5, 0.5)}


def test_three_of_a_stack_are_two_branches() -> None:
    class Parallel(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            mixed = self.gate(torch.softmax(h @ h.transpose(1, 2), -1) @ h)
            return torch.stack([x, mixed, self.f(h)]).sum(0)

    blocks = nn.Sequential(*(Parallel(PLAIN["list"]) for _ in range(DEPTH)))
    found = only_stream(anatomy_of(nn.Sequential(blocks, nn.LayerNorm(WIDTH)), torch.randn(2, 6, WIDTH)))
    assert [(b.kind, b.placement, b.parallel) for b in found.branches] == [
        ("attention", "pre", True),
        ("mlp", "pre", True),
    ] * DEPTH


PRODUCTS: dict[str, tuple[Form, str, float | None]] = {
    "gain": (lambda b, x, y: torch.addcmul(x, b.gain, y), "channel", None),
    "number": (lambda b, x, y: torch.addcmul(x, torch.tensor(0.5), y, value=0.5), "constant", 0.25),
    "gate": (lambda b, x, y: torch.addcmul(x, b.sigmoid(x), y), "gate", None),
    "quotient": (lambda b, x, y: torch.addcdiv(x, y, torch.tensor(2.0)), "constant", 0.5),
    "alpha": (lambda b, x, y: torch.add(x, y, alpha=0.5), "constant", 0.5),  # type: ignore[call-overload]
}


@pytest.mark.parametrize(("form", "kind", "value"), PRODUCTS.values(), ids=PRODUCTS)
def test_sums_with_a_product(form: Form, kind: str, value: float | None) -> None:
    for branch in stream(form).branches:
        assert (branch.skip_scale, branch.branch_scale.kind, branch.branch_scale.value) == (1.0, kind, value)


def test_factors_of_a_product_with_an_add() -> None:
    found = stream(lambda b, x, y: torch.baddbmm(x, y, torch.eye(WIDTH).expand(2, -1, -1), beta=0.5, alpha=2))
    assert {(b.skip_scale, b.branch_scale.value) for b in found.branches} == {(0.5, 2.0)}


def softmax(block: Block, x: Tensor, y: Tensor) -> Tensor:
    one, two = block.choice(x).softmax(-1).split(1, -1)
    return one * x + two * y  # type: ignore[no-any-return]


GATED: dict[str, Form] = {
    "difference": lambda b, x, y: x + b.sigmoid(x) * (y - x),
    "difference from the branch": lambda b, x, y: y + b.sigmoid(x) * (x - y),
    "gate of the branch": lambda b, x, y: (g := b.sigmoid(y)) * y + (1 - g) * x,
    "softmax": softmax,
    "unit": lambda b, x, y: b.unit(y.reshape(-1, WIDTH), x.reshape(-1, WIDTH)).view_as(x),
}


@pytest.mark.parametrize("form", GATED.values(), ids=GATED)
def test_gated_sums(form: Form) -> None:
    found = stream(form)
    assert found.topology == "gated"
    assert {(b.skip, b.skip_scale, b.branch_scale.kind) for b in found.branches} == {("gate", None, "gate")}


@pytest.mark.parametrize("form", [PLAIN["stack"], *GATED.values()], ids=["stack", *GATED])
def test_a_measured_pass_takes_no_other_operand_for_the_trunk(form: Form) -> None:
    report = normprobe.probe(net(form), torch.randn(2, 6, WIDTH), level="backward")
    assert not report.findings
    (measured,) = report.measurements.residual
    assert len(measured.states) == DEPTH
    apart = [b.apart for b in report.anatomy.streams[0].branches]
    assert [state.write_rms == state.write_rms for state in measured.states] == apart


class Looped(nn.Module):
    """A cell that runs along the tokens, its state put beside those before it."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.norm, self.cell = nn.LayerNorm(WIDTH), cell(WIDTH, WIDTH)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros(len(x), WIDTH)]
        for token in self.norm(x).unbind(1):
            states.append(self.cell(token, states[-1]))
        return x + torch.stack(states[1:], 1)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell])
def test_a_cell_that_runs_along_the_tokens_is_one_branch(cell: type[nn.RNNCellBase]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Looped(cell), Looped(cell), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    branches = only_stream(anatomy_of(model, torch.randn(2, 6, WIDTH))).branches
    assert [(b.kind, b.pre_norm) for b in branches] == [("recurrent", "1.norm"), ("recurrent", "2.norm")]


def test_numbers_that_weigh_a_stack_are_factors() -> None:
    weights = torch.tensor([1.0, 0.5])
    found = stream(lambda b, x, y: (torch.stack([x, y], -1) * weights).sum(-1))
    assert {(b.skip_scale, b.branch_scale.kind, b.branch_scale.value) for b in found.branches} == {
        (1.0, "constant", 0.5)
    }


UNREAD: dict[str, tuple[Form, str]] = {
    "negative": (lambda b, x, y: y - x, "the trunk enters it with a negative factor"),
    "product": (lambda b, x, y: torch.stack([x, y], -1) @ torch.ones(2), "it weighs trunk and branch by one product"),
}


@pytest.mark.parametrize(("form", "why"), UNREAD.values(), ids=UNREAD)
def test_a_sum_that_is_not_read_is_named(form: Form, why: str) -> None:
    report = normprobe.probe(net(form), torch.randn(2, 6, WIDTH), level="structure")
    assert not report.anatomy.streams
    (line,) = [s for s in report.skipped if s.what.startswith("the sum ")]
    assert line.what.endswith("at 1.0 and 2 more")
    assert line.why.startswith(why)


def test_rows_that_are_added_with_a_factor_have_it() -> None:
    rows = torch.arange(6)
    found = stream(lambda b, x, y: x.index_add(1, rows, y, alpha=0.5))
    assert {(b.skip_scale, b.branch_scale.kind, b.branch_scale.value) for b in found.branches} == {
        (1.0, "constant", 0.5)
    }


def test_sums_of_sums_are_read_once_each() -> None:
    """Sixty sums, each of the two before it: there are more ways through them than could be walked."""

    class Fibonacci(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f, self.g = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.f(self.norm(x)), self.g(self.norm(x)).tanh()
            for _ in range(60):
                a, b = b, a + b
            return x + b  # type: ignore[no-any-return]

    assert only_stream(anatomy_of(Fibonacci(), torch.randn(2, 6, WIDTH))).depth == 1


def test_a_code_that_replaces_a_vector_carries_no_signal_on() -> None:
    """Each quantiser takes off what its code book has; only its gradients go through the vector itself."""

    class Quantiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave, self.book = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), nn.Embedding(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            low = self.enter(x)
            code = self.book((low @ self.book.weight.T).argmax(-1))
            return x - self.leave(low + (code - low).detach())  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Quantiser() for _ in range(DEPTH)), nn.Linear(WIDTH, 5))
    assert not anatomy_of(model, torch.randn(2, 6, WIDTH)).streams
