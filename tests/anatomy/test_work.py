"""How much work recording and reading do: nothing is computed that no answer needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.anatomy.attention import ops
from normprobe.anatomy.flow.build import build
from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.statics import Statics
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.streams import chains
from normprobe.anatomy.streams.adds import find_writes
from normprobe.capture.recorder import record


def flow_of(model: nn.Module, inputs: Any) -> Flow:
    """The flow of a recorded forward, every operation a step."""
    trace = record(model, inputs)
    return build(trace, Levels(trace), Statics(model, trace), [])


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """A list that grows by one with every call of a method or function."""
    calls: list[None] = []
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


class Turned(nn.Module):
    """A pre-norm block whose branch turns its features by an angle for each token, as a rotary embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("cos", torch.rand(6, 8))
        self.register_buffer("sin", torch.rand(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(self.norm(x))
        q = q * self.cos + torch.cat((-q[..., 4:], q[..., :4]), -1) * self.sin
        return x + self.down(torch.relu(q))


def test_factors_of_sums_that_are_no_writes_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = flow_of(nn.Sequential(*[Turned() for _ in range(4)]), torch.randn(1, 6, 8))
    asked = counted(monkeypatch, Statics, "number")
    assert len(find_writes(flow).writes) == 4
    assert not asked


def test_contents_that_hang_on_a_buffer_on_meta_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = flow_of(nn.Sequential(Turned(), Turned()).to("meta"), torch.randn(1, 6, 8))
    ran = counted(monkeypatch, Statics, "_run")
    factors = [v for step in flow.steps for v in step.statics if flow.levels.buffers(v)]
    assert [flow.statics.tensor(v) for v in factors] == [None] * 4
    assert not ran


def test_a_modules_parameters_are_listed_only_where_its_result_was_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = nn.Sequential(*[Turned() for _ in range(4)])
    listed = counted(monkeypatch, nn.Module, "parameters")
    before = len(listed)
    trace = record(deep, torch.randn(1, 6, 8))
    assert len(listed) - before < len([c for c in trace.calls if not c.composite])


class Cell(nn.Module):
    """A gated cell in a loop over the tokens, inside a residual branch; its state is corrected by what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.read, self.out = nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        values, state, states = self.norm(x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state + torch.sigmoid(self.gate(state)) * torch.tanh(self.read(state) + values[:, t])
            states.append(state)
        return x + self.out(torch.stack(states, 1))


def test_the_work_for_a_loop_grows_with_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sought = counted(monkeypatch, chains, "previous"), counted(monkeypatch, ops, "_weighing")
    grown = []
    for tokens in (8, 16, 32):
        before = len(calls)
        normprobe.probe(Cell(), torch.randn(1, tokens, 8), level="structure")
        grown.append(len(calls) - before)
    assert grown[2] <= 4 * tokens
    assert grown[2] - grown[1] <= 2 * (grown[1] - grown[0]) + 1
    assert not sought  # no gate is made of a product of two signals


class Scan(nn.Module):
    """A linear scan over the tokens inside a residual branch; factors and summands are made before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.decay, self.read, self.out = nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        factors, summands, state, states = (
            torch.exp(-(self.decay(y) ** 2)),
            y * self.read(y),
            torch.zeros_like(x[:, 0]),
            [],
        )
        for t in range(x.shape[1]):
            state = factors[:, t] * state + summands[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1))


def test_no_step_of_a_scan_looks_back_over_the_ones_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = []
    for tokens in (16, 32, 64):
        flow = flow_of(Scan(), torch.randn(1, tokens, 8))
        with monkeypatch.context() as patch:
            asked = counted(patch, Flow, "made_by")
            assert len(find_writes(flow).writes) == 1
        work.append(len(asked))
    assert work[2] - work[1] <= 2.2 * (work[1] - work[0])


class Decaying(nn.Module):
    """A branch that keeps decaying sums of keys and values over the tokens, written token by token (as RWKV does)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.key, self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        keys, values, mixed = self.key(h), self.value(h), torch.zeros_like(x)
        top = above = below = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            key, value = keys[:, t], values[:, t]
            new = torch.maximum(top - self.decay, key)
            old, fresh = torch.exp(top - self.decay - new), torch.exp(key - new)
            above, below, top = old * above + fresh * value, old * below + fresh, new
            mixed[:, t] = above / below
        return x + self.out(mixed)


def test_the_work_of_a_loop_over_tokens_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, Flow, "made_by")
    found = []
    for tokens in (48, 96, 192):
        flow = flow_of(Decaying(), torch.randn(1, tokens, 8))
        before = len(asked)
        assert len(find_writes(flow).writes) == 1
        found.append(len(asked) - before)
    assert found[2] - found[1] < 2.2 * (found[1] - found[0])
