from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.measures.finite import all_finite
from normprobe.measures.forward import measure_forward
from normprobe.records import Anatomy, Measurements
from tests.measures.models import anatomy_of, gpt2, llama


def test_a_site_that_the_model_no_longer_runs_is_a_skip_and_the_rest_is_measured() -> None:
    case = llama()
    anatomy = anatomy_of(case.model, case.inputs)
    del case.model.model.layers[2]
    case.model.config.num_hidden_layers = 2
    found, skipped = measure_forward(case.model, case.inputs, anatomy)
    assert {s.what for s in skipped} == {
        "residual stream model.layers, write model.layers.2#aten.add.Tensor:0",
        "residual stream model.layers, write model.layers.2#aten.add.Tensor:1",
        "attention logits model.layers.2.self_attn#scaled_dot_product_attention:0",
        "initialisation of model.layers.2.self_attn.q_proj.weight and 6 more",
        "gain of norm model.layers.2.input_layernorm and 1 more",
    }
    assert {s.why for s in skipped} == {
        "the measured forward did not run this operation, though the recorded one did",
        "the model has no parameter of this name any more",
    }
    (stream,) = found.residual
    assert [s.branch for s in stream.states] == [0, 1, 2, 3]
    assert math.isnan(stream.growth.exponent), "a curve with a hole has no exponent"
    assert len(found.attention) == 2


class Stage(nn.Module):
    """A residual block whose shortcut is a projection to twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shortcut = nn.Linear(width, 2 * width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.down(torch.relu(self.up(self.norm(x))))


def test_every_state_of_a_stream_that_changes_its_width_is_measured() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Stage(4), Stage(8)), torch.randn(2, 5, 4)
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, y: outputs.append(y)) for block in model]
    model(x)
    for hook in hooks:
        hook.remove()
    found, skipped = measure_forward(model, x, anatomy_of(model, x))
    assert skipped == ()
    (stream,) = found.residual
    assert len(outputs) == 2
    assert [state.rms_max for state in stream.states] == pytest.approx(
        [y.double().square().mean(-1).sqrt().max().item() for y in outputs], rel=1e-5
    )


def test_the_same_seed_gives_the_same_numbers_and_the_model_is_left_alone() -> None:
    case = gpt2()
    case.model.train()
    anatomy = anatomy_of(case.model, case.inputs)
    state = {n: t.clone() for n, t in case.model.state_dict().items()}
    rng = torch.get_rng_state()
    first = measure_forward(case.model, case.inputs, anatomy)
    assert measure_forward(case.model, case.inputs, anatomy) == first
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(t, state[n]) for n, t in case.model.state_dict().items())
    assert all("forward" not in m.__dict__ and m.training for m in case.model.modules())
    assert not any(p.grad is not None for p in case.model.parameters())


def test_measurements_travel_through_json() -> None:
    case = gpt2()
    found, _ = measure_forward(case.model, case.inputs, anatomy_of(case.model, case.inputs))
    assert Measurements.model_validate_json(found.model_dump_json()) == found


class Inline(nn.Module):
    """A block that breaks the signal in its own forward, not in one of its modules."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.norm, self.linear, self.factor = nn.LayerNorm(8), nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(self.norm(x)) * self.factor
        return x


def planted(index: int) -> nn.Sequential:
    return nn.Sequential(*(Inline(math.inf if i == index else 1.0) for i in range(4)), nn.LayerNorm(8))


@pytest.mark.parametrize("index", [0, 2, 3])
def test_the_module_that_breaks_the_signal_in_its_own_forward_is_named(index: int) -> None:
    model, x = planted(index), torch.randn(1, 5, 8)
    found, _ = measure_forward(model, x, anatomy_of(model, x))
    assert found.output_finite is False
    assert found.first_non_finite == str(index)


class Enclosing(nn.Module):
    """Breaks the signal between two modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / torch.zeros(()))


def test_a_module_that_is_given_a_broken_signal_is_not_the_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Enclosing(), nn.Linear(8, 8))
    found, _ = measure_forward(model, torch.randn(1, 5, 8), Anatomy())
    assert found.first_non_finite == "1"


def test_inputs_that_are_broken_are_named_by_the_first_module_that_passes_them_on() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found, _ = measure_forward(model, torch.full((1, 5, 8), math.nan), Anatomy())
    assert found.first_non_finite == "0"


def test_a_weight_that_is_nan_is_named_by_its_module() -> None:
    case = gpt2()
    with torch.no_grad():
        case.model.transformer.h[1].mlp.c_fc.weight[0, 0] = math.nan
    found, _ = measure_forward(case.model, case.inputs, anatomy_of(case.model, case.inputs))
    assert found.first_non_finite == "transformer.h.1.mlp.c_fc"
    assert [s.finite for s in found.residual[0].states] == [True, True, True, False, False, False]


class Masked(nn.Module):
    """Passes a mask of −∞ to the module that breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masks()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.full((5, 5), -math.inf).triu(1))


class Masks(nn.Module):
    """Breaks the signal in its own forward, then passes it to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm((x @ x.mT + mask).softmax(-1) @ x / torch.zeros(()))


def test_a_mask_of_minus_infinity_is_no_fault() -> None:
    found, _ = measure_forward(Masked(), torch.randn(1, 5, 8), Anatomy())
    assert found.first_non_finite == "inner"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (torch.ones(3), True),
        (torch.tensor([1.0, math.nan]), False),
        (torch.tensor([1.0, -math.inf]), False),
        ({"a": [torch.ones(1), (torch.tensor(math.inf),)]}, False),
        (torch.tensor([complex(0, math.nan)]), False),
        (torch.ones(0), True),
        (torch.ones(3, dtype=torch.int64), None),
        (torch.tensor([60000.0, 60000.0]).half(), True),
        (None, None),
    ],
)
def test_all_finite(output: Any, expected: bool | None) -> None:
    assert all_finite(output) is expected


def test_an_output_without_floats_is_a_skip() -> None:
    class Argmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    found, (skip,) = measure_forward(Argmax(), torch.randn(2, 3), Anatomy())
    assert found.output_finite is None
    assert skip.what == "outputs"


def test_an_error_of_the_model_passes_through() -> None:
    case = gpt2()
    anatomy = anatomy_of(case.model, case.inputs)
    with pytest.raises(IndexError, match="index out of range"):
        measure_forward(case.model, {"input_ids": torch.full((1, 4), 10**6)}, anatomy)
    assert all("forward" not in m.__dict__ for m in case.model.modules())


def test_there_is_nothing_to_measure_on_meta() -> None:
    model = planted(9)
    anatomy = anatomy_of(model, torch.randn(1, 5, 8))
    found, (skip,) = measure_forward(model.to("meta"), torch.randn(1, 5, 8, device="meta"), anatomy)
    assert found == Measurements()
    assert "meta device" in skip.why
