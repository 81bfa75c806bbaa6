"""Leave no trace: whatever a forward changes in its model or in torch is put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from tests.trace import Snapshot


class Careless(nn.Module):
    """Runs `deed` on itself in its forward."""

    def __init__(self, deed: Callable[[Any], object]) -> None:
        super().__init__()
        self.deed = deed
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.tensor([1.0, float("nan"), -0.0]))
        self.register_buffer("absent", None)
        self.plain = torch.arange(3.0)
        self.count, self.cache, self.log, self.names = 0, {}, [1], {"a"}
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.deed(self)
        return self.inner(x)


def batch_norm(m: Careless) -> None:
    F.batch_norm(torch.randn(8, 3), m.norm.running_mean, m.norm.running_var, training=True)


def counts(m: Careless) -> None:
    m.count += 1
    m.norm.num_batches_tracked += 1


def caches(m: Careless) -> None:
    m.cache["key"] = torch.randn(2)
    m.log.append(2)
    m.names.add("b")


def replaces(m: Careless) -> None:
    m.cache, m.log, m.state = {"other": 1}, [], torch.randn(2)
    m.table = torch.zeros(5)
    m.absent = torch.zeros(2)


def adds_parts(m: Careless) -> None:
    m.extra = nn.Linear(2, 2)
    m.register_buffer("late", torch.zeros(1))
    m.inner.late = nn.Parameter(torch.zeros(1))
    m.new_attribute = 3


def drops_parts(m: Careless) -> None:
    del m.plain, m.table, m.norm


def writes_plain_tensors(m: Careless) -> None:
    m.plain.mul_(2)
    m.plain[0] = float("nan")
    m.table.fill_(3.0)


def clears_nan(m: Careless) -> None:
    m.table.nan_to_num_(5.0)


def flags(m: Careless) -> None:
    m.train()
    m.inner.eval()


def hooks(m: Careless) -> None:
    m.inner.register_forward_hook(lambda *a: None)
    m.norm.register_forward_pre_hook(lambda *a: None)
    m.register_full_backward_hook(lambda *a: None)


def own_forward(m: Careless) -> None:
    m.inner.forward = lambda x: x


def draws(m: Careless) -> None:
    torch.rand(3)
    random.random()
    np.random.rand()
    F.dropout(torch.ones(5), training=True)


def seeds(m: Careless) -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def backends(m: Careless) -> None:
    torch.backends.mha.set_fastpath_enabled(True)
    torch.set_grad_enabled(True)


DEEDS = (
    batch_norm,
    counts,
    caches,
    replaces,
    adds_parts,
    drops_parts,
    writes_plain_tensors,
    clears_nan,
    flags,
    hooks,
    own_forward,
    draws,
    seeds,
    backends,
)


def mixed(deed: Callable[[Any], object]) -> Careless:
    """A model partly in train mode, with gradients, hooks and a frozen parameter."""
    torch.manual_seed(0)
    model = Careless(deed)
    model.inner.train()
    model.norm.eval()
    model.training = False
    model.inner.weight.requires_grad_(False)
    model.inner.bias.grad = torch.ones(3)
    model.inner.register_forward_hook(lambda *a: None)
    return model


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("raises", [False, True])
def test_deed_is_undone(deed: Callable[[Any], object], raises: bool) -> None:
    model = mixed(deed)
    before = Snapshot(model)
    expected = pytest.raises(KeyError, match="midway") if raises else nullcontext()
    with expected, untouched(model), torch.no_grad():
        model(torch.ones(2, 3))
        if raises:
            raise KeyError("midway")
    before.assert_kept()


@pytest.mark.parametrize("deed", DEEDS)
def test_deed_would_be_seen_without_the_guard(deed: Callable[[Any], object]) -> None:
    """Every deed leaves a trace of its own: the test above cannot pass by doing nothing."""
    model = mixed(deed)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            before = Snapshot(model)
            model(torch.ones(2, 3))
            assert before.changes()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def test_error_of_the_body_passes_through() -> None:
    with pytest.raises(KeyError, match="midway"), untouched(mixed(caches)):
        raise KeyError("midway")


def test_open_guard_means_eval_mode_and_no_fast_path() -> None:
    model = mixed(counts)
    with untouched(model):
        assert not any(m.training for m in model.modules())
        assert not torch.backends.mha.get_fastpath_enabled()
    assert [m.training for m in model.modules()] == [False, True, False]


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_flags_of_torch_are_kept_as_they_were(fast_path: bool, grad: bool) -> None:
    saved = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        with torch.set_grad_enabled(grad):
            with untouched(mixed(backends)):
                torch.set_grad_enabled(not grad)
            assert torch.is_grad_enabled() is grad
        assert torch.backends.mha.get_fastpath_enabled() is fast_path
    finally:
        torch.backends.mha.set_fastpath_enabled(saved)


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    def three() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    model = mixed(draws)
    seed()
    expected = three(), three()
    seed()
    first = three()
    with untouched(model):
        draws(model)
    assert (first, three()) == expected


def test_identity_of_containers_and_tensors_is_kept() -> None:
    model = mixed(caches)
    cache, table, plain, parameter = model.cache, model.table, model.plain, model.inner.weight
    with untouched(model):
        replaces(model)
        writes_plain_tensors(model)
    assert model.cache is cache
    assert model.table is table
    assert model.plain is plain
    assert model.inner.weight is parameter


def test_meta_tensors_are_no_obstacle() -> None:
    model = mixed(counts).to("meta")
    with untouched(model):
        model.count += 1
    assert model.count == 0


BEYOND = pytest.mark.xfail(reason="the values of parameters and gradients are not copied")


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(lambda m: m.table.copysign_(torch.ones(3)), id="signed zero"),
        pytest.param(lambda m: m.inner.weight.requires_grad_(True), id="requires_grad"),
        pytest.param(lambda m: setattr(m.inner.bias, "grad", None), id="gradient dropped"),
        pytest.param(lambda m: setattr(m.inner.weight, "grad", torch.ones(3, 3)), id="gradient made"),
        pytest.param(lambda m: m.inner.bias.data.add_(1.0), id="parameter", marks=BEYOND),
        pytest.param(lambda m: m.inner.bias.grad.add_(1.0), id="gradient", marks=BEYOND),
        pytest.param(lambda m: m.cache["nest"].append(1), id="nested"),
    ],
)
def test_rarer_deeds(deed: Callable[[Any], object]) -> None:
    model = mixed(deed)
    model.cache["nest"] = []
    before = Snapshot(model)
    with torch.no_grad(), untouched(model):
        model(torch.ones(2, 3))
    before.assert_kept()


def test_memory_exchanged_under_a_buffer() -> None:
    model = mixed(lambda m: setattr(m.table, "data", torch.zeros(7)))
    table, contents = model.table, model.table.clone()
    with untouched(model):
        model(torch.ones(2, 3))
    assert model.table is table
    assert torch.equal(table.view(torch.int32), contents.view(torch.int32))
