"""What a forward writes into parameters, gradients, nested tensors and objects is put back, and copied only then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe.capture import guard
from normprobe.capture.guard import untouched
from normprobe.capture.writes import written
from tests.capture.deeds import counts, mixed
from tests.trace import Snapshot


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(lambda m: m.table.copysign_(torch.ones(3)), id="signed zero"),
        pytest.param(lambda m: m.inner.weight.requires_grad_(True), id="requires_grad"),
        pytest.param(lambda m: setattr(m.inner.bias, "grad", None), id="gradient dropped"),
        pytest.param(lambda m: setattr(m.inner.weight, "grad", torch.ones(3, 3)), id="gradient made"),
        pytest.param(lambda m: m.inner.bias.data.add_(1.0), id="parameter"),
        pytest.param(lambda m: m.inner.bias.grad.add_(1.0), id="gradient"),
        pytest.param(lambda m: m.inner.weight.copysign_(torch.tensor(-1.0)), id="sign of a parameter"),
        pytest.param(lambda m: torch._foreach_mul_([m.inner.weight, m.inner.bias], 2.0), id="parameters at once"),
        pytest.param(lambda m: torch.mul(m.inner.bias, 2.0, out=m.inner.bias), id="out"),
        pytest.param(lambda m: m.inner.weight.view(-1)[2:4].zero_(), id="view of a parameter"),
        pytest.param(lambda m: setattr(m.inner.weight, "data", torch.zeros(3, 3)), id="memory of a parameter"),
        pytest.param(lambda m: m.inner.weight.data.zero_() + exchange(m.inner.weight), id="written, then exchanged"),
        pytest.param(lambda m: F.embedding(torch.arange(3), m.inner.weight, max_norm=0.1), id="embedding"),
        pytest.param(lambda m: m.cache["nest"].append(1), id="nested"),
        pytest.param(lambda m: m.cache["tensors"][0][0].add_(1), id="nested tensor"),
        pytest.param(lambda m: m.queue.append(4), id="queue"),
        pytest.param(lambda m: setattr(m.config, "calls", 1), id="config"),
        pytest.param(lambda m: setattr(m.config, "new", 1), id="new in config"),
        pytest.param(lambda m: m.config.inner.log.append(1), id="inner config"),
        pytest.param(lambda m: m.config.inner.tensor.zero_(), id="tensor in config"),
    ],
)
def test_rarer_deeds(deed: Callable[[Any], object]) -> None:
    model = mixed(deed)
    model.cache |= {"nest": [], "tensors": ([torch.ones(2)],)}
    model.queue = deque([1, 2, 3], 3)
    model.config = SimpleNamespace(calls=0, inner=SimpleNamespace(log=[], tensor=torch.ones(2)))
    bare = Snapshot(model)
    with torch.no_grad(), untouched(model) as keeper, keeper.mode():
        model(torch.ones(2, 3))
        assert set(bare.changes()) - {"dispatch modes", ": training", "inner: training"}, "the deed leaves a trace"
    bare.assert_kept()


def exchange(parameter: Tensor) -> Tensor:
    parameter.data = torch.ones(3, 3)
    return parameter


def test_parameters_are_copied_only_when_written_and_once() -> None:
    model = mixed(counts)
    with torch.no_grad(), untouched(model) as keeper, keeper.mode():
        model(torch.ones(2, 3))
        assert len(keeper.steps) == 0
        model.inner.weight.mul_(2)
        model.inner.weight.mul_(2)
        assert len(keeper.steps) == 1


def test_large_nested_tensors_are_copied_only_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_NESTED", 10)
    model = mixed(counts)
    model.cache = {"small": torch.ones(8), "large": torch.ones(8)}
    before = Snapshot(model)
    with untouched(model) as keeper:
        model.cache["small"].zero_()
        with keeper.mode():
            model.cache["large"].zero_()
        assert len(keeper.steps) == 1
    before.assert_kept()


def test_inner_guard_leaves_what_it_wrote_to_the_outer_one() -> None:
    """A backward pass between their ends sees the weights of its forward."""
    model = mixed(lambda m: m.inner.weight.data.mul_(3))
    before = Snapshot(model)
    weight = model.inner.weight.detach().clone()
    with untouched(model), torch.no_grad():
        with untouched(model) as keeper, keeper.mode():
            model(torch.ones(2, 3))
        assert torch.equal(model.inner.weight, weight * 3)
    before.assert_kept()


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "places", "names", "expected"),
    [
        (aten.add.Tensor, 2, (), ()),
        (aten.add_.Tensor, 2, (), (0,)),
        (aten.mul.out, 2, ("out",), (2,)),
        (aten.embedding_renorm_.default, 2, (), (0,)),
        (aten._foreach_add_.List, 2, (), (0, 1)),
        (torch.ops.higher_order.flex_attention, 2, (), ()),
    ],
)
def test_written_arguments(function: Any, places: int, names: tuple[str, ...], expected: tuple[int, ...]) -> None:
    tensors = [torch.ones(1) for _ in range(places + len(names))]
    args: list[Any] = tensors[:places]
    if function is aten._foreach_add_.List:
        args = [tensors, tensors[:0]]
    found = written(function, args, dict(zip(names, tensors[places:], strict=True)))
    assert [id(t) for t in found] == [id(tensors[i]) for i in expected]
