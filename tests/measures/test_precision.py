"""Half precision against float32: errors against an independent comparison, overflow, reductions, what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import Measurements, Skipped
from normprobe.records.precision import PlaceError, PrecisionMeasure, PrecisionPass
from normprobe.report.tables import Table, tables
from normprobe.report.tables.precision import make
from tests.models import MODELS, WIDTH, Mlp, RMSNorm, llama
from tests.test_no_trace import lived_in
from tests.trace import Snapshot


class Careless(nn.Module):
    """An RMSNorm that sums its squares in whatever dtype it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def stack(norm: type[nn.Module] = RMSNorm) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(norm()), Block(norm()), norm()).eval()


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3))


def measured(model: nn.Module, inputs: Any = X, **options: Any) -> PrecisionMeasure:
    found = normprobe.probe(model, inputs, measures=("precision",), **options).data.measurements.precision
    assert found is not None
    return found


def table_of(title: str, one: PrecisionMeasure) -> Table:
    (found,) = [table for table in make(Measurements(precision=one)) if table.title == title]
    return found


def at(one: PrecisionPass, place: str, path: str) -> PlaceError:
    (found,) = [each for each in one.places if (each.place, each.path) == (place, path)]
    return found


def hooked(model: nn.Module, x: Tensor, names: list[str]) -> list[Tensor]:
    seen: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda m, a, y, name=name: seen.update({name: y.double()}))
    with torch.no_grad():
        model(x)
    return [seen[name] for name in names]


@pytest.mark.parametrize(("number", "dtype"), [(0, torch.bfloat16), (1, torch.float16)])
def test_errors_of_norms_writes_streams_and_the_output(number: int, dtype: torch.dtype) -> None:
    one = measured(stack()).passes[number]
    assert (one.dtype, one.how, one.first_non_finite) == (str(dtype)[6:], "cast", None)
    names = ["1.norm", "1.mlp", "1", "2"]
    wide, half = hooked(stack(), X, names), hooked(stack().to(dtype), X.to(dtype), names)
    places = [("norm", "1.norm"), ("write", "1"), ("stream", "1"), ("norm", "2")]
    for (place, path), a, b in zip(places, half, wide, strict=True):
        found = at(one, place, path)
        assert found.error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-9)
        assert found.largest == pytest.approx(float(b.abs().max()))
        assert (found.count, found.exact, found.finite, found.dtype) == (X.numel(), True, True, str(dtype)[6:])
    assert at(one, "output", "output").error == at(one, "norm", "2").error
    assert [place.place for place in one.places] == ["norm", "write", "stream"] * 2 + ["norm", "output"]


def test_large_tensors_are_sampled() -> None:
    x = torch.randn(4, 1000, WIDTH, generator=torch.Generator().manual_seed(3))
    found = at(measured(stack(), x).passes[0], "norm", "2")
    (wide,), (half,) = hooked(stack(), x, ["2"]), hooked(stack().bfloat16(), x.bfloat16(), ["2"])
    assert (found.count, found.exact) == (16384, False)
    assert found.error == pytest.approx(float((half - wide).norm() / wide.norm()), rel=0.05)
    assert found.largest == pytest.approx(float(wide.abs().max()))


def test_the_first_overflow_is_named() -> None:
    model = stack()
    with torch.no_grad():
        model[0].mlp.up.weight.mul_(1e6)
        model[0].mlp.down.weight.mul_(1e-6)
    wide, narrow = measured(model).passes
    assert wide.first_non_finite is None
    assert narrow.first_non_finite == "0.mlp.up"
    assert narrow.first_operation is None  # its weights are infinite in float16 before any operation runs
    assert at(narrow, "norm", "0.norm").finite
    broken = at(narrow, "write", "0")
    assert not broken.finite
    assert math.isnan(broken.error)
    assert math.isfinite(broken.largest)


def test_an_add_that_overflows_is_named_as_such() -> None:
    model = stack()
    with torch.no_grad():
        for block in (model[0], model[1]):
            block.mlp.down.bias = nn.Parameter(torch.full((WIDTH,), 40000.0))
    wide, narrow = measured(model).passes
    assert (wide.first_non_finite, wide.first_operation) == (None, None)
    assert (narrow.first_non_finite, narrow.first_operation) == ("1", "aten.add.Tensor")
    assert at(narrow, "write", "1").finite
    assert not at(narrow, "stream", "1").finite
    caption = table_of("Precision, cast to float16", measured(model)).caption
    assert caption == "the output is not finite; first not finite: 1 (aten.add.Tensor)"


def test_branches_that_are_added_in_one_place_are_told_apart() -> None:
    model, inputs = llama()
    found = measured(model, inputs)
    writes = [one for one in found.passes[0].places if one.place == "write"]
    assert [one.kinds for one in writes] == [("attention",), ("mlp",)] * (len(writes) // 2)
    assert [one.branches for one in writes] == [(index,) for index in range(len(writes))]
    assert {one.stream for one in writes} == {"model.layers"}
    labels = [(row[1], row[0]) for row in table_of("Precision, cast to bfloat16", found).rows]
    assert len(set(labels)) == len(labels)
    assert {("write", "model.layers.0 (attention)"), ("stream", "model.layers.0 (MLP)")} <= set(labels)


class Twice(nn.Module):
    """One block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(RMSNorm())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def test_runs_of_one_module_are_numbered() -> None:
    rows = table_of("Precision, cast to bfloat16", measured(Twice().eval())).rows
    told = {(row[1], row[0]) for row in rows}
    assert {("norm", "block.norm"), ("norm", "block.norm, run 2"), ("write", "block (MLP), run 2")} <= told


class Fused(Block):
    """Adds inside the product, so that the write is never a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        return torch.addmm(rows, torch.relu(self.mlp.up(self.norm(rows))), self.mlp.down.weight.T).view_as(x)


def test_a_write_that_is_no_tensor_is_said() -> None:
    model = nn.Sequential(Fused(RMSNorm()), Fused(RMSNorm()), RMSNorm()).eval()
    report = normprobe.probe(model, X, measures=("precision",))
    found = report.data.measurements.precision
    assert found is not None
    assert {one.place for one in found.passes[0].places} == {"norm", "stream", "output"}
    why = "the write is no tensor of its own: this operation makes it and the sum at once"
    assert Skipped(what="precision in bfloat16 at 0#aten.addmm.default:0", why=why) in report.skipped


def test_a_tensor_of_zeros_has_the_largest_value_zero() -> None:
    model = stack()
    with torch.no_grad():
        for parameter in model[1].mlp.down.parameters():
            parameter.zero_()
    found = at(measured(model).passes[0], "write", "1")
    assert math.copysign(1, found.largest) == 1
    assert (found.largest, found.error) == (0, 0)


def test_reductions_in_half_precision() -> None:
    careful, careless = (measured(stack(norm)).passes[0] for norm in (RMSNorm, Careless))
    assert careful.reductions == ()
    assert [(r.path, r.op, r.dtype, r.calls) for r in careless.reductions] == [
        (path, "mean", "bfloat16", 1) for path in ("0.norm", "1.norm", "2")
    ]
    listed = table_of("Reductions in half precision, cast to bfloat16", measured(stack(Careless)))
    assert listed.rows == (("0.norm", "mean", "1"), ("1.norm", "mean", "1"), ("2", "mean", "1"))
    assert at(careful, "norm", "2").reduction == "float32"
    assert at(careless, "norm", "2").reduction == "input"


class Largest(nn.Module):
    """A norm by the largest entry: its reductions pick, and sum nothing."""

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.aminmax(dim=-1, keepdim=True)
        return x / (torch.maximum(high, -low) + x.max(-1, True).values + x.amax(-1, True) - x.amin(-1, True))


def test_reductions_that_pick_an_entry_round_nothing() -> None:
    assert measured(nn.Sequential(nn.Linear(WIDTH, WIDTH), Largest(), nn.LayerNorm(WIDTH))).passes[0].reductions == ()


def test_a_half_model_is_tested_as_it_is_and_so_is_one_under_autocast() -> None:
    model = stack().bfloat16()
    (own,) = measured(model, X.bfloat16()).passes
    assert (own.dtype, own.how) == ("bfloat16", "own")
    (wide,), (half,) = (
        hooked(copy.deepcopy(model).float(), X.bfloat16().float(), ["2"]),
        hooked(model, X.bfloat16(), ["2"]),
    )
    assert at(own, "norm", "2").error == pytest.approx(float((half - wide).norm() / wide.norm()), rel=1e-9)
    (cast,) = measured(stack(), autocast="bfloat16").passes
    assert (cast.dtype, cast.how) == ("bfloat16", "autocast")
    assert at(cast, "stream", "1").dtype == "float32"
    assert 1e-4 < at(cast, "stream", "1").error < 2e-2


class Stubborn(Mlp):
    """Has no kernel for float16."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float16:
            raise NotImplementedError('"mlp" not implemented for Half')
        return super().forward(x)


def test_what_does_not_run_is_said() -> None:
    model = stack()
    model[1].mlp = Stubborn()
    report = normprobe.probe(model, X, measures=("precision",))
    assert report.data.measurements.precision is not None
    assert [one.dtype for one in report.data.measurements.precision.passes] == ["bfloat16"]
    why = 'the model does not run so: NotImplementedError: "mlp" not implemented for Half'
    assert Skipped(what="precision in float16", why=why) in report.skipped


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "gemma2", "decoder_post"])
def test_every_kind_of_model_is_measured_and_left_as_it_was(name: str) -> None:
    model, inputs = lived_in(MODELS[name]())
    before = Snapshot(model, inputs)
    found = measured(model, inputs)
    before.assert_kept()
    assert [one.dtype for one in found.passes] == ["bfloat16", "float16"]
    for one in found.passes:
        assert {place.place for place in one.places} == {"norm", "write", "stream", "output"}
        assert all(place.error < 0.1 for place in one.places)


def test_the_table_has_the_largest_error_first() -> None:
    model, inputs = llama()
    report = normprobe.probe(model, inputs, measures=("precision",))
    *_, wide, _ = tables(report.data)
    errors = [float(row[2]) for row in wide.rows]
    assert errors == sorted(errors, reverse=True)
    assert wide.title == "Precision, cast to bfloat16"
    assert wide.caption.startswith("relative error of the output ")
