"""Every norm of the zoo is recognised, what is no norm is not, and nothing is left behind."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from torch import Tensor, nn

from normprobe.capture.calls import CallSpec
from normprobe.norms.identify import identify, identify_module
from normprobe.norms.subject import Instance, draw
from normprobe.records import NormSpec
from tests.norms import cases, zoo


def differences(spec: NormSpec | None, facts: dict[str, object]) -> dict[str, object]:
    """The facts that do not hold, with what was found; eps may be off by 1 %."""
    if spec is None:
        return {"kind": None}
    wrong = {}
    for name, wanted in facts.items():
        got = getattr(spec, name)
        close = isinstance(wanted, float) and got is not None and abs(got - wanted) <= 0.01 * wanted
        if got != wanted and not close:
            wrong[name] = got
    return wrong


@pytest.mark.parametrize("case", cases.TORCH + cases.CUSTOM, ids=lambda case: case.name)
def test_zoo(case: zoo.Case) -> None:
    spec = identify_module(case.build(), case.call)
    assert differences(spec, case.facts) == {}
    assert spec is not None
    assert spec.evidence


def test_transformers() -> None:
    listed = cases.transformers_cases()
    wrong = {c.name: differences(identify_module(c.build(), c.call), c.facts) for c in listed}
    assert {name: each for name, each in wrong.items() if each} == {}


@pytest.mark.parametrize("name", zoo.NO_NORMS)
def test_no_norm(name: str) -> None:
    build, shapes = zoo.NO_NORMS[name]
    assert identify_module(build(), zoo.call_of(*shapes)) is None


def test_planted_lies_are_told_apart() -> None:
    twins = [
        zoo.RMSNorm(),
        zoo.RMSNorm(placement="outside_sqrt"),
        zoo.RMSNorm(upcast=False),
        nn.LayerNorm(zoo.WIDTH),
    ]
    specs = [identify_module(twin, zoo.call_of(zoo.ROWS)) for twin in twins]
    seen = {(s.kind, s.eps_placement, s.reduction) for s in specs if s is not None}
    assert len(seen) == len(twins)


def test_values_of_the_parameters_do_not_matter() -> None:
    norm = nn.LayerNorm(zoo.WIDTH)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(float("nan"))
    assert differences(identify_module(norm, zoo.call_of(zoo.ROWS)), cases.LN) == {}


def test_a_long_input_is_shortened_but_its_size_is_kept() -> None:
    spec = identify_module(zoo.RMSNorm(), zoo.call_of((64, 100000, zoo.WIDTH)))
    assert spec is not None
    assert (spec.kind, spec.size) == ("rmsnorm", zoo.WIDTH)


def test_leaves_no_trace() -> None:
    norm = nn.BatchNorm2d(16).train()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook of the original ran"))
    norm.weight.grad = torch.full((16,), 3.0)
    before = copy.deepcopy(norm.state_dict())
    torch.manual_seed(7)
    random.seed(7)
    states, python = torch.get_rng_state(), random.getstate()
    with torch.enable_grad():
        assert identify_module(norm, zoo.call_of(zoo.MAP)) is not None
        assert torch.is_grad_enabled()
    assert norm.training
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())
    assert torch.equal(norm.weight.grad, torch.full((16,), 3.0))
    assert norm.weight.requires_grad
    assert len(norm._forward_hooks) == 1
    assert torch.equal(states, torch.get_rng_state())
    assert python == random.getstate()


def test_a_module_that_draws_random_numbers_leaves_the_state() -> None:
    state, python = torch.get_rng_state(), random.getstate()
    assert identify_module(nn.Dropout(0.5), zoo.call_of(zoo.ROWS)) is None
    assert identify_module(zoo.Rule(lambda self, x: x + torch.randn_like(x)), zoo.call_of(zoo.ROWS)) is None
    assert identify_module(zoo.Rule(lambda self, x: x + random.random()), zoo.call_of(zoo.ROWS)) is None
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == python


def test_a_module_that_cannot_run_is_reported() -> None:
    failures: list[str] = []
    norm = nn.LayerNorm(zoo.WIDTH)
    assert identify_module(norm, zoo.call_of((2, zoo.WIDTH + 1)), failures) is None
    assert len(failures) == 1
    assert "cannot run a copy of a LayerNorm" in failures[0]
    assert "(2, 33)" in failures[0]


class Function:
    """A subject that is no module: the root mean square norm of a graph piece with one gain."""

    shape = recorded_shape = (4, 24)
    dtype, device = torch.float32, torch.device("cpu")

    def instance(self, dtype: torch.dtype, seed: int | None, train: bool = False) -> Instance:
        held = {"g": torch.ones(24, dtype=torch.float64)}
        held = held if seed is None else draw(held.items(), frozenset({"g"}), seed)
        tensors = {name: value.to(dtype) for name, value in held.items()}

        def call(x: Tensor) -> Tensor:
            wide = x if dtype is torch.float64 else x.float()
            root = (wide.pow(2).mean(-1, keepdim=True) + 3e-6).sqrt()
            return (wide / root).to(dtype) * tensors["g"]

        return Instance(call, tensors, frozenset({"g"}), dtype)


def test_a_subject_of_another_sort() -> None:
    wanted = {**cases.RMS, "eps": 3e-6, "weight": "g", "size": 24}
    assert differences(identify(Function()), wanted) == {}


def test_speed() -> None:
    """One layer norm takes 5 ms on a free core; the limit leaves room for a busy machine."""
    norm, call = nn.LayerNorm(768), zoo.call_of((2, 16, 768))
    identify_module(norm, call)
    start = time.process_time()
    for _ in range(5):
        identify_module(norm, call)
    assert (time.process_time() - start) / 5 < 0.1


class OnlyEmpty(nn.Module):
    """Takes maps without positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1]:
            raise ValueError("positions")
        return x * self.weight


def test_a_module_that_ran_on_nothing_is_not_looked_at() -> None:
    assert identify_module(OnlyEmpty(), CallSpec.of((torch.ones(2, 3, 0),), {})) is None


@pytest.mark.parametrize("module", [nn.LayerNorm(zoo.WIDTH), nn.BatchNorm1d(zoo.WIDTH), zoo.RMSNorm()])
def test_what_is_drawn_does_not_follow_the_default_device(module: nn.Module) -> None:
    call = zoo.call_of((6, zoo.WIDTH) if isinstance(module, nn.BatchNorm1d) else zoo.ROWS)
    plain = identify_module(module, call)
    assert plain is not None
    with torch.device("meta"):
        assert identify_module(module, call) == plain
