"""ToRMSNorm is exact for all inputs, or refused: what stands between a weight that writes and the sum, and dropout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import ToRMSNorm, make_plan
from tests.models import WIDTH, shuffled, to_meta
from tests.rewrites.cases import outputs, snapshot

Behind = Callable[["Block", Tensor, Tensor], Tensor]
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    """x + behind(down(gelu(up(n))), n) for n = norm(x)."""

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        self.norm, self.behind = nn.LayerNorm(WIDTH), behind
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.vector, self.gain = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("held", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.behind(self, self.down(F.gelu(self.up(n))), n)


CLOSED: dict[str, Behind] = {
    "relu": lambda b, y, n: F.relu(y),
    "clamp": lambda b, y, n: y.clamp(-99, 99),
    "tanh": lambda b, y, n: y.tanh(),
    "softmax": lambda b, y, n: y.softmax(-1),
    "mask over features": lambda b, y, n: y.masked_fill(b.held > 0.5, 0.0),
    "filled with a number": lambda b, y, n: y.masked_fill(y[..., :1].isnan(), 1.0),
    "number": lambda b, y, n: y + 1e-9,
    "buffer": lambda b, y, n: y + 1e-9 * b.held,
    "factor for each feature": lambda b, y, n: y * b.held,
    "factor that reads what is written": lambda b, y, n: y * y[..., :1].sigmoid(),
    "gate": lambda b, y, n: y * (1 + 1e-9 * y),
    "signal": lambda b, y, n: y + 1e-9 * torch.tanh(y),
    "bounded": lambda b, y, n: torch.where(y.abs() > 99, torch.zeros_like(y), y),
}
OPEN: dict[str, Behind] = {
    "nothing": lambda b, y, n: y,
    "vector": lambda b, y, n: y + b.vector,
    "constant": lambda b, y, n: y / 3,
    "mask over tokens": lambda b, y, n: y.masked_fill(torch.arange(5).gt(3).unsqueeze(-1), 0.0),
    "moves": lambda b, y, n: y.flip(-1).unflatten(-1, (4, 8)).mT.contiguous().mT.flatten(-2),
    "over tokens": lambda b, y, n: torch.bmm(torch.ones(2, 5, 5).double() / 5, y),
    "mean over tokens": lambda b, y, n: y.mean(1, keepdim=True),
}


def stack(behind: Behind) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Block(behind) for _ in range(2))
    return shuffled(nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))).double().eval()


@pytest.mark.parametrize("name", CLOSED)
def test_what_can_bring_a_mean_back_is_refused_though_these_inputs_do_not_show_it(name: str) -> None:
    model = stack(CLOSED[name])
    kept = snapshot(model)
    with pytest.raises(RewriteError, match="ToRMSNorm would change nothing"):
        make_plan(model, [ToRMSNorm()], X).apply()
    assert snapshot(model) == kept


def test_the_refusal_names_the_operation_and_its_place() -> None:
    ((refused),) = make_plan(stack(CLOSED["clamp"]), [ToRMSNorm()], X).steps[0][1].refused
    assert refused.why.startswith("clamp.default in 0 stands between a weight that writes and the sum")


@pytest.mark.parametrize("name", OPEN)
def test_what_keeps_a_mean_of_zero_is_passed(name: str) -> None:
    model, others = stack(OPEN[name]), 9 * X.flip(0)
    before = [outputs(model, x) for x in (X, others)]
    plan = make_plan(model, [ToRMSNorm()], X).apply()
    assert len(plan.steps[0][1].sites) >= 3
    for x, was in zip((X, others), before, strict=True):
        assert torch.allclose(outputs(model, x), was, rtol=0, atol=1e-9)


def notes(behind: Behind) -> tuple[str, ...]:
    model = stack(behind)
    kept, was = snapshot(model), model.training
    found = make_plan(model, [ToRMSNorm()], X).steps[0][1].notes
    assert (snapshot(model), model.training) == (kept, was)
    return found


def test_dropout_that_is_no_module_is_told() -> None:
    (note,) = notes(lambda b, y, n: F.dropout(y, 0.3, b.training))
    assert note.startswith("the model has dropout")
    assert not notes(lambda b, y, n: F.dropout(y, 0.0, b.training))


def test_a_model_that_does_not_run_in_train_mode_says_so() -> None:
    def refuse(block: Block, y: Tensor, n: Tensor) -> Tensor:
        if block.training:
            raise ValueError("eval mode alone")
        return y

    (note,) = notes(refuse)
    assert note.endswith("since it does not run there (ValueError: eval mode alone)")


def test_without_weights_dropout_is_left_open() -> None:
    model = to_meta(stack(OPEN["nothing"]))
    (note,) = make_plan(model, [ToRMSNorm()], X.to("meta")).steps[0][1].notes
    assert note == "exact in eval mode; whether train mode has dropout cannot be seen without weights"
