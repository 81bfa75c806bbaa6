"""Single writes and what their operation is, against float64 by hand.

Dims: B batch, S tokens of a sample, C features.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from normprobe.measures.forward import measure_signal
from normprobe.measures.together import Together
from normprobe.measures.trunk import Trunk
from normprobe.measures.writes import WriteHandler
from normprobe.measures.written import Written, alike, tell
from normprobe.records import Branch, OpSite
from tests.measures.models import Adds, anatomy_of

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def branch(op: str = "aten.add.Tensor", **more: Any) -> Branch:
    return Branch(path="a", block="a", kind="mlp", placement="pre", add=OpSite(path="a", op=op), **more)


def told(handler: WriteHandler, arguments: dict[str, Any], output: Tensor) -> Written:
    handler.before(arguments)
    handler.after(arguments, output)
    found = handler.written()
    assert found is not None, handler.failed
    return found


def alone(one: Branch | None = None, trunk: Trunk | None = None) -> WriteHandler:
    return WriteHandler(trunk or Trunk(-1), Together(tell, alike), one or branch())


def written(trunk: Tensor, write: Tensor) -> Written:
    return told(alone(), {"self": trunk, "other": write}, trunk + write)


def median(x: Tensor) -> float:
    return float(x.double().quantile(0.5))


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.double(), b.double(), dim=-1).flatten()


def test_tokens_that_are_0_on_one_side_have_no_cosine_and_no_part_in_it() -> None:
    trunk, write = X.clone(), 0.3 * Y
    write[0, 1] = 0  # a token that a gate shuts
    trunk[1, 2] = 0
    sides = written(trunk, write).sides
    both = [i for i in range(10) if i not in (1, 7)]
    assert sides.cosine == pytest.approx(median(cosines(trunk, write)[both]), abs=1e-5)
    angles = cosines(trunk, trunk + write).clamp(-1, 1).acos()
    angles[1] = 0.0
    assert sides.angle == pytest.approx(median(angles[[i for i in range(10) if i != 7]]), rel=1e-4)
    ratio = write.norm(dim=-1).flatten() / trunk.norm(dim=-1).flatten()
    assert sides.ratio == pytest.approx(median(ratio), rel=1e-5)


def test_a_write_of_nothing_turns_nothing() -> None:
    sides = written(X, torch.zeros_like(X)).sides
    assert (sides.angle, sides.ratio, sides.share) == (0.0, 0.0, 0.0)
    assert math.isnan(sides.cosine)


def test_a_nan_among_tokens_that_are_0_is_not_left_out() -> None:
    write = Y.clone()
    write[0, 1], write[1, 3, 2] = 0, math.nan
    assert math.isnan(written(X, write).sides.cosine)


@pytest.mark.parametrize("size", [1e-4, 1.0, 8e3, 1e6])
def test_the_cosine_is_told_however_unlike_the_sizes_are(size: float) -> None:
    found = written(X, size * Y).sides.cosine
    assert found == pytest.approx(median(cosines(X, Y)), abs=1e-5)


@pytest.mark.parametrize("trunk_first", [True, False])
def test_an_add_into_one_of_its_operands_is_compared_before_it_overwrites_that(trunk_first: bool) -> None:
    trunk, write = X.clone(), 0.1 * Y
    first, second = (trunk, write) if trunk_first else (write, trunk)
    handler = alone(branch("aten.add.out", trunk=0 if trunk_first else 1))
    given = {"self": first, "other": second, "out": trunk}
    handler.before(given)
    handler.after(given, torch.add(first, second, out=trunk))
    found = handler.written()
    assert found is not None
    assert found.sides.cosine == pytest.approx(median(cosines(X, Y)), abs=1e-4)
    assert found.sides.ratio == pytest.approx(median((0.1 * Y).norm(dim=-1) / X.norm(dim=-1)), rel=1e-4)


def test_an_interpolation_by_a_tensor_has_no_sides() -> None:
    gate = torch.rand(2, 5, 1)
    given = {"self": X, "end": Y, "weight": gate}
    found = told(alone(branch("aten.lerp.Tensor", apart=False)), given, torch.lerp(X, Y, gate))
    assert math.isnan(found.sides.ratio)
    assert found.rms.median > 0


def test_rows_that_are_put_in_their_places_are_the_output_without_the_trunk() -> None:
    trunk, rows, index = X[0], Y[0], torch.tensor([0, 0, 1, 4, 2])
    output = trunk.index_add(0, index, rows)
    given = {"self": trunk, "dim": 0, "index": index, "source": rows}
    sides = told(alone(branch("aten.index_add.default", apart=False)), given, output).sides
    write = output - trunk
    some = write.norm(dim=-1) > 0
    assert sides.cosine == pytest.approx(median(cosines(trunk[some], write[some])), abs=1e-5)


def test_a_product_that_is_the_trunk_has_no_sides() -> None:
    given = {"self": X[0], "mat1": Y[0], "mat2": torch.eye(16)}
    found = told(alone(branch("aten.addmm.default", apart=False, trunk=1)), given, X[0] + Y[0])
    assert math.isnan(found.sides.ratio)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_angle_in_half_precision_is_that_of_the_rounded_state(dtype: torch.dtype) -> None:
    trunk, write = X.to(dtype), (2e-3 * Y).to(dtype)
    state = trunk + write
    a, b = (t.double() / t.double().norm(dim=-1, keepdim=True) for t in (trunk, state))
    expected = 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
    assert told(alone(), {"self": trunk, "other": write}, state).sides.angle == pytest.approx(
        median(expected), rel=1e-3
    )


def test_rounding_is_that_of_the_scaled_sum() -> None:
    total, added = X.double() + 0.01 * Y.double(), 0.01 * Y
    found = told(alone(branch()), {"self": X, "other": Y, "alpha": 0.01}, X + 0.01 * Y)
    lost = float((total.bfloat16().double() - total).norm() / added.double().norm())
    assert found.rounding[0] == pytest.approx(lost, rel=0.01)


def test_a_write_that_float32_loses_is_lost_in_bfloat16_too() -> None:
    """A trunk that bfloat16 holds, and a write far below the spacing of float32 beside it."""
    trunk, write = X.bfloat16().float(), 1e-9 * Y
    assert told(alone(), {"self": trunk, "other": write}, trunk + write).rounding[0] == pytest.approx(1.0, rel=1e-3)


def test_tokens_that_are_0_have_no_direction() -> None:
    state = X.clone()
    state[0, 2] = state[1, :3] = 0
    found = []
    for sample in state.double():
        some = sample[sample.norm(dim=-1) > 0]
        unit = some / some.norm(dim=-1, keepdim=True)
        found.append((unit @ unit.mT)[~torch.eye(len(some), dtype=torch.bool)])
    cosine = written(state, torch.zeros_like(state)).moments.token_cosine
    assert cosine == pytest.approx(float(torch.cat(found).mean()), abs=1e-6)


def test_states_with_equally_many_tokens_in_other_samples_are_told_apart() -> None:
    x = torch.randn(12, 8)
    x[[4, 8]] *= 50  # first tokens of three samples of four, not of two of six
    shared, together = Trunk(-1), Together(tell, alike)
    found = []
    for shape in ((2, 6, 8), (3, 4, 8)):
        handler = WriteHandler(shared, together, branch())
        state = x.view(shape)
        handler.before({"self": state, "other": torch.zeros_like(state)})
        handler.after({"self": state, "other": torch.zeros_like(state)}, state)
        found.append(handler)
    rms = x.square().mean(-1).sqrt()
    firsts = [one.written().moments.first_rms for one in found]  # type: ignore[union-attr]
    assert firsts == pytest.approx([median(rms[[0, 6]]), median(rms[[0, 4, 8]])], rel=1e-5)


@pytest.mark.parametrize("size", [1e20, 1e30, -1e20])
def test_the_spread_of_a_constant_stream_whose_squares_float32_does_not_hold(size: float) -> None:
    found = written(torch.full((2, 5, 16), size), torch.zeros(2, 5, 16))
    assert found.moments.mean == pytest.approx(size, rel=1e-6)
    assert found.moments.std == pytest.approx(0.0, abs=1e-6 * abs(size))


def test_tokens_of_a_state_on_another_device_are_there_too() -> None:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    shared = Trunk(-1, [padding])
    here, there = shared.tokens(X), shared.tokens(X.to("meta"))
    assert here.kept is not None
    assert {each.device.type for each in there if each is not None} == {"meta"}
    assert [each.shape for each in there if each is not None] == [each.shape for each in here if each is not None]
    assert shared.tokens(X) is here


def test_tokens_are_drawn_alike_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        found = Trunk(-1, seed=3).tokens(X)
    assert torch.equal(found.sample, Trunk(-1, seed=3).tokens(X).sample)


class Inferring(nn.Module):
    """Runs its blocks in inference mode, whose tensors count no writes."""

    inferring: ClassVar[bool] = True

    def __init__(self, adds: Adds, in_place: bool) -> None:
        super().__init__()
        self.blocks, self.norm, self.in_place = adds.blocks, adds.norm, in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(self.inferring):
            x = x.clone()
            for block in self.blocks:
                if self.in_place:
                    x += block(x)
                else:
                    x = x + block(x)
            return self.norm(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_forward_in_inference_mode_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    model = Inferring(Adds(torch.randn(4, 16)), in_place).eval()
    monkeypatch.setattr(Inferring, "inferring", False)
    anatomy = anatomy_of(model, X)
    plain, _ = measure_signal(model, X, anatomy)
    monkeypatch.setattr(Inferring, "inferring", True)
    found, skipped = measure_signal(model, X, anatomy)
    assert skipped == ()
    for state, expected in zip(found.residual[0].states, plain.residual[0].states, strict=True):
        assert state.write_ratio == pytest.approx(expected.write_ratio, rel=1e-5)
        assert state.write_cosine == pytest.approx(expected.write_cosine, abs=1e-5)
        assert state.rms_median == pytest.approx(expected.rms_median, rel=1e-5)
        assert state.token_cosine == pytest.approx(expected.token_cosine, abs=1e-5)
