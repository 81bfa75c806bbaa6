"""Equal outputs are no proof where the inputs do not reach what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.diffing.facts import difference
from normprobe.diffing.judge import of_form
from normprobe.records import Severity
from normprobe.records.diff import SignalDiff, SiteDiff
from normprobe.report.diffs.report import DiffReport
from tests.diffing.models import RMS, WIDTH, Block, decoder, tokens
from tests.trace import Snapshot

HIDDEN = "for these inputs the output that is compared, the first, does not hang on them"


def errors(report: DiffReport) -> dict[str, tuple[tuple[str, str], ...]]:
    return {f"{d.subject} {d.fact}": d.where for d in report.differences if d.severity is Severity.ERROR}


def unseen(model: Any) -> list[int]:
    return sorted(set(range(len(model.embedding.weight))) - set(tokens().flatten().tolist()))


def test_rows_that_are_not_looked_up() -> None:
    other = decoder()
    with torch.no_grad():
        other.embedding.weight[unseen(other)] += 1
    report = normprobe.diff(decoder(), other, tokens())
    assert errors(report) == {"weights unreached_values": (("embedding.weight", "embedding.weight"),)}
    assert report.differences[0].message == f"1 weight of 26 holds {32 * len(unseen(other))} other values; {HIDDEN}"
    assert (report.verdict, report.complete) == ("differs", True)


class Placed(nn.Module):
    """The decoder with positions that are added, and a second head of the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()
        torch.manual_seed(1)
        self.places = nn.Parameter(torch.randn(40, WIDTH))
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner.embedding(ids) + self.places[: ids.shape[1]]
        for block in self.inner.blocks:
            x = block(x)
        x = self.inner.norm(x)
        return self.inner.head(x), self.value(x)


def far(model: Placed) -> None:
    model.places[20:] = 0


def valued(model: Placed) -> None:
    model.value.weight.mul_(2)
    model.value.bias.sub_(1)


@pytest.mark.parametrize(
    ("plant", "names"),
    [(far, ["places"]), (valued, ["value.weight", "value.bias"])],
    ids=["positions", "second output"],
)
def test_what_the_compared_output_does_not_reach(plant: Callable[[Placed], None], names: list[str]) -> None:
    other = Placed()
    with torch.no_grad():
        plant(other)
    plain = Placed()
    before = Snapshot(plain)
    report = normprobe.diff(plain, other, tokens())
    assert errors(report) == {"weights unreached_values": tuple((name, name) for name in names)}
    assert before.changes() == []


def test_added_positions_that_are_reached_are_compared_by_value() -> None:
    other = Placed()
    with torch.no_grad():
        other.places[3] += 1
    assert ("places", "places") in errors(normprobe.diff(Placed(), other, tokens()))["weights values"]


class Experts(nn.Module):
    """Two experts of which a router takes one a token."""

    def __init__(self, second: nn.Module, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.router = nn.Linear(WIDTH, 2)
        self.norm = RMS(WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), second])
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        chosen = self.router(h).softmax(-1) if not self.turned else self.router(h).softmax(-1).flip(-1)
        first = chosen[..., :1] > chosen[..., 1:]
        return x + torch.where(first, self.experts[0](h), self.experts[1](h))


def routed(*, second: float, turned: bool = False) -> Any:
    """A decoder whose middle block has experts; every token goes to the first of them."""
    model: Any = decoder()
    torch.manual_seed(6)
    expert = nn.Linear(WIDTH, WIDTH)
    model.blocks[1] = Experts(expert, turned)
    with torch.no_grad():
        expert.weight.mul_(second)
        model.blocks[1].router.bias.copy_(torch.tensor([-30.0, 30.0] if turned else [30.0, -30.0]))
    return model.eval()


def test_an_expert_that_is_not_chosen() -> None:
    report = normprobe.diff(routed(second=1.0), routed(second=3.0), tokens())
    place = "blocks.1.experts.1.weight"
    assert errors(report) == {"weights unreached_values": ((place, place),)}


def reordered(model: Any) -> None:
    order = torch.randperm(2 * WIDTH, generator=torch.Generator().manual_seed(0))
    up, down = model.blocks[0].up, model.blocks[0].down
    up.weight.copy_(up.weight[order])
    up.bias.copy_(up.bias[order])
    down.weight.copy_(down.weight[:, order])


def test_another_form_of_what_is_reached_leaves_the_rest_unknown() -> None:
    other = decoder()
    with torch.no_grad():
        reordered(other)
    report = normprobe.diff(decoder(), other, tokens())
    assert (report.verdict, report.complete, errors(report)) == ("same", True, {})
    with torch.no_grad():
        other.embedding.weight[unseen(other)] += 1
    report = normprobe.diff(decoder(), other, tokens())
    assert (report.verdict, report.complete, errors(report)) == ("unknown", False, {})
    assert [(one.what, HIDDEN in one.why) for one in report.skipped] == [("weights embedding.weight", True)]


def silent(model: Any) -> Any:
    with torch.no_grad():
        model.blocks[1].down.weight.zero_()
        model.blocks[1].attention.out.weight.zero_()
    return model


def test_facts_behind_a_weight_of_zeros_stay_errors() -> None:
    other = silent(decoder())
    other.blocks[1].second = nn.LayerNorm(WIDTH, eps=1e-6)
    other.blocks[1].attention.scale = 1.0
    report = normprobe.diff(silent(decoder()), other, tokens())
    assert report.signal is not None
    assert report.signal.sites[-1].step is False
    assert {"norm kind", "norm subtracts_mean", "attention scale"} <= errors(report).keys()
    assert all(HIDDEN in d.message for d in report.differences if d.severity is Severity.ERROR)


class Cut(nn.Module):
    """A model whose output autograd knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).detach()


def test_without_a_gradient_it_is_not_known() -> None:
    other = Cut()
    with torch.no_grad():
        reordered(other.inner)
    report = normprobe.diff(Cut(), other, tokens())
    assert (report.verdict, report.complete) == ("unknown", False)
    assert [one.what for one in report.skipped] == ["what the outputs hang on, as other facts are not the same"]
    assert "autograd cannot differentiate the model" in report.skipped[0].why
    assert normprobe.diff(Cut(), Cut(), tokens()).complete


def alike() -> SignalDiff:
    numbers = {"error": 0.0, "noise": 0.0, "limit": 1e-6, "rms_a": 1.0, "rms_b": 1.0, "cosine": 1.0}
    site = SiteDiff(kind="output", a="output", b="output", step=False, count=1, exact=True, **numbers)
    return SignalDiff(dtype="float32", sites=(site,))


@pytest.mark.parametrize(
    "fact", ["eps", "eps_placement", "softcap", "window", "causal", "sinks", "activation", "batch_dependent"]
)
def test_what_acts_on_other_inputs_is_no_form(fact: str) -> None:
    (found,) = of_form([difference("norm", fact, Severity.ERROR, (1.0, 2.0), ("a", "b"))], alike(), None)
    assert found.severity is Severity.ERROR
    (found,) = of_form([difference("norm", "kind", Severity.ERROR, ("x", "y"), ("a", "b"))], alike(), None)
    assert found.severity is Severity.NOTE


def test_nothing_compared_is_not_the_same_whatever_milder_is_found() -> None:
    class Chosen(nn.Module):
        def __init__(self, block: Block, late: bool) -> None:
            super().__init__()
            self.block, self.norm = block, RMS(WIDTH, late_gain=late)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.block(x)).argmax(-1)

    models = [Chosen(decoder().blocks[0], late) for late in (False, True)]  # type: ignore[arg-type]
    models[1].norm.load_state_dict(models[0].norm.state_dict())
    report = normprobe.diff(*models, torch.randn(2, 5, WIDTH))
    assert (report.verdict, report.complete) == ("differs", False)
    assert not report.failed("error")
    assert "not enough was compared to tell more" in repr(report)
