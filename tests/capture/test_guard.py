"""Leave no trace: whatever a forward changes in its model or in torch is put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normprobe.capture import guard
from normprobe.capture.guard import untouched
from tests.capture.deeds import DEEDS, backends, caches, counts, draws, mixed, replaces, writes_plain_tensors
from tests.trace import Snapshot


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


def test_step_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixed(lambda m: (counts(m), writes_plain_tensors(m), draws(m)))
    before = Snapshot(model)
    stubborn, refill = model.inner.__dict__, guard._refill

    def failing(container: Any, copy: Any) -> None:
        refill(container, copy)
        if container is stubborn:
            raise OSError("planted")

    monkeypatch.setattr(guard, "_refill", failing)
    with pytest.raises(OSError, match="planted"), untouched(model), torch.no_grad():
        model(torch.ones(2, 3))
    before.assert_kept()


def test_lazy_modules_and_inference_tensors_are_no_obstacle() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.append(nn.LazyLinear(3))
    state = torch.get_rng_state()
    with untouched(model):
        torch.rand(1)
        with torch.inference_mode():
            model[1].running_mean.add_(1)
    assert torch.equal(model[1].running_mean, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in model.modules())


def test_resized_buffer() -> None:
    """Its memory was exchanged by torch, its form and bits come back."""
    model = mixed(lambda m: m.table.resize_(50).fill_(2.0))
    contents = model.table.clone()
    with untouched(model), torch.no_grad():
        model(torch.ones(2, 3))
        assert model.table.shape == (50,)
    assert torch.equal(model.table.view(torch.int32), contents.view(torch.int32))


def test_memory_exchanged_under_a_buffer() -> None:
    model = mixed(lambda m: setattr(m.table, "data", torch.zeros(7)))
    table, contents = model.table, model.table.clone()
    with untouched(model):
        model(torch.ones(2, 3))
    assert model.table is table
    assert torch.equal(table.view(torch.int32), contents.view(torch.int32))


def test_a_step_that_is_interrupted_is_taken_again_and_so_are_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixed(lambda m: (counts(m), writes_plain_tensors(m), draws(m)))
    before = Snapshot(model)
    refill, calls = guard._refill, []

    def interrupted(container: Any, copy: Any) -> None:
        calls.append(container)
        if len(calls) == 2:
            raise KeyboardInterrupt
        refill(container, copy)

    monkeypatch.setattr(guard, "_refill", interrupted)
    with pytest.raises(KeyboardInterrupt), untouched(model), torch.no_grad():
        model(torch.ones(2, 3))
    before.assert_kept()
    assert len(calls) > 3
