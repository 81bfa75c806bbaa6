"""What a forward returns, and what it is refused for, when it is recorded."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.capture.guard import untouched
from normprobe.capture.invoke import invoke
from normprobe.capture.outputs import named_tensors
from normprobe.capture.recorder import record
from normprobe.capture.watch import watch
from normprobe.errors import InputError
from tests.capture.deeds import mixed
from tests.capture.flow import output_sources
from tests.models import MODELS
from tests.trace import Snapshot


@dataclass
class Output:
    x: Tensor
    more: Any = None


class Returns(nn.Module):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.inner, self.pack = nn.Linear(4, 4, bias=False), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.inner(x))


X = torch.randn(2, 4)


def test_a_dataclass_is_opened() -> None:
    trace = record(Returns(lambda y: Output(y, [Output(y * 2)])), X)
    assert output_sources(trace) == {"x": {"inner.weight", "0"}, "more.0.x": {"inner.weight", "0"}}
    assert trace.notes == []


@pytest.mark.parametrize("pack", [lambda y: None, lambda y: float(y.sum()), lambda y: [object()]])
def test_no_tensor_returned_is_noted(pack: Any) -> None:
    trace = record(Returns(pack), X)
    assert trace.outputs == []
    assert trace.notes == ["the forward returned no tensor"]
    report = normprobe.probe(Returns(pack), X, level="structure")
    assert "the forward returned no tensor" in [s.why for s in report.skipped]


def test_lazy_module_is_refused_before_anything_happens() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LazyLinear(4)), nn.BatchNorm1d(4))
    flags = [m.training for m in model.modules()]
    with pytest.raises(InputError, match=r"^1\.0\.weight has no values yet") as caught:
        record(model, X)
    assert "LazyLinear at 1.0" in str(caught.value)
    assert "try: run it once first" in str(caught.value)
    assert [m.training for m in model.modules()] == flags
    model(X)
    assert record(model, X).outputs[0][0] == "output"


@pytest.mark.parametrize("run", [record, lambda m, x: watch(m, x, {})])
def test_writes_into_parameters_are_put_back(run: Any) -> None:
    model = mixed(lambda m: (m.inner.weight.data.add_(1), m.inner.bias.grad.add_(1)))
    before = Snapshot(model)
    run(model, torch.ones(2, 3))
    before.assert_kept()


@pytest.mark.parametrize("run", [record, lambda m, x: watch(m, x, {})])
def test_writes_into_inputs_are_not_the_callers(run: Any) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.full((2, 4), -1.0)
    before = Snapshot(model, x)
    run(model, x)
    before.assert_kept()


def test_copies_of_inputs_are_no_operations() -> None:
    trace = record(nn.ReLU(inplace=True), X)
    assert [n.op for n in trace.nodes] == ["input", "aten.relu_.default"]


class Onlooker:
    """Keeps a copy of what it was told."""

    def __init__(self) -> None:
        self.outputs: list[list[Tensor]] = []

    def beside(self) -> nullcontext[None]:
        return nullcontext()

    def gave(self, output: Any) -> None:
        self.outputs.append([tensor.clone() for _, tensor in named_tensors(output)])


@pytest.mark.parametrize("name", MODELS)
def test_recorded_forward_gives_the_same_output_bit_for_bit(name: str) -> None:
    model, inputs = MODELS[name]()
    onlooker = Onlooker()
    record(model, inputs, onlooker)
    with untouched(model) as keeper, torch.no_grad(), keeper.mode():
        plain = [tensor for _, tensor in named_tensors(invoke(model, inputs))]
    assert len(onlooker.outputs) == 1
    for recorded, expected in zip(onlooker.outputs[0], plain, strict=True):
        torch.testing.assert_close(recorded, expected, rtol=0, atol=0, equal_nan=True)


def test_an_output_is_told_before_the_model_is_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.count.add_(x.sum())

    model, onlooker = Counts(), Onlooker()
    record(model, torch.ones(3), onlooker)
    assert onlooker.outputs[0][0].tolist() == [3.0]
    assert model.count.tolist() == [0.0]
