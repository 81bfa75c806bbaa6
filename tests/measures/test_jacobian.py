"""Mean squared singular values against full float64 Jacobians and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from normprobe.measures import jacobian
from normprobe.measures.extra import Subject
from normprobe.measures.jacobian import PROBES, Jacobian
from normprobe.records.jacobian import JacobianMeasure, MeanSquare
from normprobe.report.tables import tables
from tests.measures.models import Adds, anatomy_of
from tests.models import MODELS, decoder, ids, to_meta


def jacobian_of(model: nn.Module, inputs: Any, seed: int = 0) -> JacobianMeasure:
    found, skipped = Jacobian().measure(Subject(model, inputs, anatomy_of(model, inputs), seed=seed))
    assert skipped == ()
    assert found is not None
    return found


def full(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Mean squared singular value of the whole Jacobian, from its singular values."""
    whole = torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel())
    return float(torch.linalg.svdvals(whole).square().sum()) / x.numel()


def assert_near(found: MeanSquare, exact: float) -> None:
    assert 0 < found.standard_error < 0.2 * exact
    assert found.value == pytest.approx(exact, abs=4 * found.standard_error)


def test_a_scaled_isometry_is_measured_without_error() -> None:
    layers = [nn.Linear(16, 16) for _ in range(3)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain=1.5)
    found = jacobian_of(nn.Sequential(*layers), torch.randn(4, 16))
    (chain,) = found.streams
    assert [b.square.value for b in chain.blocks] == pytest.approx([1.5**2] * 3)
    assert [b.square.standard_error for b in chain.blocks] == pytest.approx([0.0] * 3, abs=1e-6)
    assert chain.whole.value == pytest.approx(1.5**6)
    (output,) = found.output
    assert (output.start, output.inputs, output.outputs) == ("input", 64, 64)
    assert output.value == pytest.approx(1.5**6)


def test_a_matrix_has_its_mean_square_per_input_whatever_its_shape() -> None:
    wide = nn.Linear(8, 24)
    (output,) = jacobian_of(nn.Sequential(wide), torch.randn(5, 8)).output
    assert_near(output, float(wide.weight.detach().double().square().sum()) / 8)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_blocks_and_stack_equal_the_full_jacobian_within_the_error(placement: str) -> None:
    torch.manual_seed(0)
    model, _ = decoder(placement, final=placement != "post")
    tokens = ids(1)[:, :5]
    found = jacobian_of(model.double(), tokens)
    (stream,) = found.streams

    def block(index: int, x: Tensor) -> Tensor:
        """From sum to sum, so a post-norm block begins with the norm before it."""
        if placement == "pre":
            return model.blocks[index](x)
        x = model.blocks[index - 1].think.norm(x) if index else x
        x = model.blocks[index].mix(x)
        return x + model.blocks[index].think.branch(x)

    state = first = model.embedding(tokens).detach()
    for index, measured in enumerate(stream.blocks):
        assert_near(measured.square, full(lambda x, index=index: block(index, x), state))
        state = block(index, state).detach()

    def stack(x: Tensor) -> Tensor:
        for index in range(3):
            x = block(index, x)
        return x

    last = model.final if model.final is not None else model.blocks[-1].think.norm
    assert_near(stream.whole, full(stack, first))
    assert_near(found.output[0], full(lambda x: model.head(last(stack(x))), first))


def test_the_standard_error_is_that_of_the_mean() -> None:
    """Over many seeds the values scatter as much as one run says."""
    model, x = nn.Sequential(nn.Linear(6, 6)), torch.randn(1, 6)
    runs = [jacobian_of(model, x, seed).output[0] for seed in range(40)]
    scatter = float(torch.tensor([run.value for run in runs]).std())
    said = float(torch.tensor([run.standard_error for run in runs]).square().mean().sqrt())
    assert said == pytest.approx(scatter, rel=0.35)


def test_a_stream_that_only_takes_writes_is_the_identity() -> None:
    (stream,) = jacobian_of(Adds(torch.eye(4)), torch.randn(2, 3, 4)).streams
    assert [b.square.value for b in stream.blocks] == pytest.approx([1.0] * len(stream.blocks))


def test_the_same_seed_gives_the_same_numbers() -> None:
    model, tokens = decoder("pre")
    assert jacobian_of(model, tokens, 3) == jacobian_of(model, tokens, 3) != jacobian_of(model, tokens, 4)


def test_progress_and_probes_are_told() -> None:
    model, tokens = decoder("pre")
    told: list[tuple[str, int, int]] = []
    subject = Subject(model, tokens, anatomy_of(model, tokens), tell=lambda *stage: told.append(stage))
    found, _ = Jacobian().measure(subject)
    assert told == [("jacobian", done, 3) for done in (1, 2, 3)]
    assert found is not None
    assert found.probes == PROBES == jacobian.PROBES


def test_models_on_meta_are_skipped() -> None:
    model, tokens = decoder("pre")
    anatomy = anatomy_of(model, tokens)
    found, (skip,) = Jacobian().measure(Subject(to_meta(model), tokens, anatomy))
    assert found is None
    assert "meta" in skip.why


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_has_an_output_jacobian(name: str) -> None:
    model, inputs = MODELS[name]()
    found = probe(model, inputs, measures=("jacobian",)).data.measurements.jacobian
    assert found is not None
    assert found.output
    assert all(square.value > 0 for square in found.output)


def test_one_jacobian_under_several_names_has_one_estimate() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 5, batch_first=True), torch.randn(2, 4, 6)
    report = probe(model, x, measures="jacobian")
    found = report.measurements.jacobian
    (chain,), (output,) = found.streams, found.output
    (block,) = chain.blocks
    same = [(one.value, one.standard_error) for one in (block.square, chain.whole, output)]
    assert len(set(same)) == 1
    (table,) = [table for table in tables(report.data) if table.title == "Jacobians"]
    assert len(table.rows) == 2, "the only layer, and the way from the input to the output"
