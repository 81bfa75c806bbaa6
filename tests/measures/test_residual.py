from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from normprobe.capture.watch import watch
from normprobe.measures.forward import measure_forward
from normprobe.measures.residual import position, read_stream, write_handlers
from normprobe.records import StreamMeasure
from tests.measures.models import CASES, Adds, Case, anatomy_of, bert, gpt2, llama, neox, tapped


def measured(model: nn.Module, inputs: object) -> StreamMeasure:
    found, skipped = measure_forward(model, inputs, anatomy_of(model, inputs))
    assert skipped == ()
    (stream,) = found.residual
    return stream


def token_rms(x: Tensor, axis: int) -> Tensor:
    return x.square().mean(axis).sqrt().flatten()


@pytest.mark.parametrize("build", CASES)
def test_every_state_equals_a_float64_reference_taken_by_hooks(build: Callable[[], Case]) -> None:
    case = build()
    anatomy = anatomy_of(case.model, case.inputs)
    found, skipped = measure_forward(case.model, case.inputs, anatomy)
    assert skipped == ()
    assert len(found.residual) == len(case.taps)
    assert found.output_finite
    assert found.first_non_finite is None
    for stream, measure, taps in zip(anatomy.streams, found.residual, case.taps, strict=True):
        references = tapped(case.model, case.inputs, taps)
        assert len(measure.states) == len(references)
        for state, x in zip(measure.states, references, strict=True):
            moved = x.movedim(stream.feature_axis, -1)
            samples = moved.flatten(1, -2) if moved.dim() > 2 else moved[None]
            kept = kept_of(case, samples)
            rms = token_rms(samples, -1).where(kept.flatten(), 0.0)
            total = samples[kept]
            assert measure.basis.count == len(total)
            assert state.rms_median == pytest.approx(float(rms[kept.flatten()].quantile(0.5)), rel=1e-5)
            assert state.rms_p99 == pytest.approx(float(rms[kept.flatten()].quantile(0.99)), rel=1e-5)
            assert state.rms_max == pytest.approx(float(rms.max()), rel=1e-5)
            assert state.rms_argmax == int(rms.argmax())
            assert state.position == state.rms_argmax % samples.shape[1]
            assert state.abs_max == pytest.approx(float(total.abs().max()), rel=1e-6)
            assert state.abs_argmax_channel == int(total.abs().argmax()) % stream.width
            assert state.finite
            assert state.mean == pytest.approx(float(total.mean()), abs=1e-6 * float(total.std()))
            assert state.std == pytest.approx(float(total.std(correction=0)), rel=1e-5)
            assert state.token_cosine == pytest.approx(mean_cosine(samples, kept), abs=1e-5)
            firsts = torch.stack([sample[keep][0] for sample, keep in zip(samples, kept, strict=True)])
            assert state.first_rms == pytest.approx(float(token_rms(firsts, -1).quantile(0.5)), rel=1e-5)


def kept_of(case: Case, samples: Tensor) -> Tensor:
    """Which tokens are no padding, [B, S]."""
    mask = case.inputs.get("attention_mask") if isinstance(case.inputs, dict) else None
    shape = samples.shape[:2]
    return mask.bool() if mask is not None and mask.shape == shape else torch.ones(shape, dtype=torch.bool)


def mean_cosine(samples: Tensor, kept: Tensor) -> float:
    """Over all pairs of different tokens of each sample, one by one."""
    found = []
    for sample in (sample[keep] for sample, keep in zip(samples, kept, strict=True)):
        unit = sample / sample.norm(dim=-1, keepdim=True)
        cosine = unit @ unit.mT
        found.append(cosine[~torch.eye(len(sample), dtype=torch.bool)])
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("build", [gpt2, llama])
def test_writes_are_compared_with_the_trunk_as_a_float64_reference_does(build: Callable[[], Case]) -> None:
    case = build()
    measure = measured(case.model, case.inputs)
    references = tapped(case.model, case.inputs, case.taps[0])
    for state, before, after in zip(measure.states[1:], references, references[1:], strict=False):
        write = after - before
        cosine = torch.cosine_similarity(write, before, dim=-1)
        angle = torch.cosine_similarity(after, before, dim=-1).clamp(-1, 1).acos()
        assert state.write_cosine == pytest.approx(float(cosine.quantile(0.5)), abs=1e-4)
        assert state.angle == pytest.approx(float(angle.quantile(0.5)), rel=1e-3)
        assert state.write_rms == pytest.approx(float(token_rms(write, -1).quantile(0.5)), rel=1e-4)
        share = token_rms(write, -1) / token_rms(after, -1)
        assert state.write_share == pytest.approx(float(share.quantile(0.5)), rel=1e-4)
        total = after.flatten(0, 1).float()  # no more tokens than the sample holds
        lost = (total.bfloat16().float() - total).norm() / write.flatten(0, 1).norm()
        assert state.bf16_loss == pytest.approx(float(lost), rel=0.02)
        lost = (total.half().float() - total).norm() / write.flatten(0, 1).norm()
        assert state.fp16_loss == pytest.approx(float(lost), rel=0.02)
        assert state.write_max == pytest.approx(float(token_rms(write, -1).max()), rel=1e-4)
        singular = torch.linalg.svdvals(after.flatten(0, 1).double())
        assert state.stable_rank == pytest.approx(float(singular.square().sum() / singular[0] ** 2), rel=2e-3)
    sizes = [state.write_rms for state in measure.states]
    assert measure.independent_rms == pytest.approx(math.hypot(measure.entry_rms, *sizes))
    assert measure.headroom is not None
    assert measure.headroom.float16 == pytest.approx(65504 / max(state.abs_max for state in measure.states))


def test_the_cosine_of_tokens_before_the_first_write() -> None:
    case = gpt2()
    model, ids = case.model, case.inputs["input_ids"]
    wte, wpe = (table.weight.double() for table in (model.transformer.wte, model.transformer.wpe))
    entry = (wte[ids] + wpe[: ids.shape[1]]).detach().flatten(0, 1)[None]
    expected = mean_cosine(entry, torch.ones(entry.shape[:2], dtype=torch.bool))
    assert measured(model, case.inputs).entry_cosine == pytest.approx(expected, abs=1e-6)


def test_closed_forms_of_writes_of_one_size() -> None:
    independent = measured(Adds(torch.eye(24)), torch.zeros(1, 5, 24))
    assert independent.effective_depth == pytest.approx(24)
    assert independent.independent_rms == pytest.approx(independent.states[-1].rms_median)
    assert [s.write_cosine for s in independent.states[1:]] == pytest.approx([0.0] * 23, abs=1e-6)
    assert [s.angle for s in independent.states[1:]] == pytest.approx([math.atan(n**-0.5) for n in range(1, 24)])
    assert [s.write_share for s in independent.states] == pytest.approx([n**-0.5 for n in range(1, 25)])
    assert independent.states[5].token_cosine == pytest.approx(1.0)
    assert independent.states[5].stable_rank == pytest.approx(1.0)
    parallel = measured(Adds(torch.full((12, 16), 0.5)), torch.zeros(2, 5, 16))
    assert [s.write_cosine for s in parallel.states[1:]] == pytest.approx([1.0] * 11)
    assert [s.bf16_loss for s in parallel.states] == [0.0] * 12
    assert parallel.states[-1].rms_median / parallel.independent_rms == pytest.approx(math.sqrt(12))


def test_padding_is_left_out() -> None:
    adds, x = Adds(torch.randn(6, 16)), torch.randn(2, 7, 16)
    stream = anatomy_of(adds, x).streams[0]
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, :2], padding[1, 6:] = True, True
    handlers = write_handlers(stream, [padding])
    watched = watch(adds, x.masked_fill(padding[..., None], 1e4), handlers)
    measure, _ = read_stream(stream, handlers, watched)
    assert measure is not None
    kept = x[~padding]
    for n, state in enumerate(measure.states, 1):
        total = kept + sum(block.linear.bias for block in adds.blocks[:n]).detach()
        assert state.rms_median == pytest.approx(float(token_rms(total, -1).quantile(0.5)), rel=1e-5)
        assert state.abs_max == pytest.approx(float(total.abs().max()), rel=1e-6)
        assert state.std == pytest.approx(float(total.std(correction=0)), rel=1e-5)
        assert state.position in range(7)
        firsts = total[[0, 5]].square().mean(-1).sqrt()
        assert state.first_rms == pytest.approx(float(firsts.mean()), rel=1e-5)
    assert measure.basis.count == 11


@pytest.mark.parametrize("build", [gpt2, llama, neox])
def test_the_write_ratio_is_that_of_consecutive_states(build: Callable[[], Case]) -> None:
    case = build()
    measure = measured(case.model, case.inputs)
    references = tapped(case.model, case.inputs, case.taps[0])
    for state, before, after in zip(measure.states[1:], references, references[1:], strict=False):
        ratio = token_rms(after - before, -1) / token_rms(before, -1)
        assert state.write_ratio == pytest.approx(float(ratio.quantile(0.5)), rel=1e-4)


def test_the_entry_is_the_trunk_before_the_first_write() -> None:
    case = llama()
    (embedded,) = tapped(case.model, case.inputs, [(case.model.model.embed_tokens, "out")])
    expected = float(token_rms(embedded, -1).quantile(0.5))
    assert measured(case.model, case.inputs).entry_rms == pytest.approx(expected, rel=1e-5)


def test_post_norm_states_are_sums_and_their_ratio_uses_the_normed_trunk() -> None:
    case = bert()
    measure = measured(case.model, case.inputs)
    block = case.model.encoder.layer[1]
    trunk, total = tapped(case.model, case.inputs, [(block, "in"), (block.attention.output.LayerNorm, "in")])
    ratio = (token_rms(total - trunk, -1) / token_rms(trunk, -1))[kept_of(case, total).flatten()]
    assert measure.states[2].write_ratio == pytest.approx(float(ratio.quantile(0.5)), rel=1e-4)


def test_parallel_branches_share_one_state() -> None:
    case = neox()
    anatomy = anatomy_of(case.model, case.inputs)
    assert anatomy.streams[0].depth == 6
    states = measured(case.model, case.inputs).states
    assert [state.branch for state in states] == [1, 3, 5]
    assert {state.kind for state in states} == {"attention+mlp"}


def test_independent_unit_writes_grow_with_exponent_one_half() -> None:
    measure = measured(Adds(torch.eye(24)), torch.zeros(1, 5, 24))
    assert measure.growth.exponent == pytest.approx(0.5, abs=1e-6)
    assert measure.growth.r_squared == pytest.approx(1.0)
    assert [s.rms_median for s in measure.states] == pytest.approx([math.sqrt(n / 24) for n in range(1, 25)])


def test_writes_in_one_direction_grow_with_exponent_one() -> None:
    measure = measured(Adds(torch.full((12, 16), 0.5)), torch.zeros(2, 5, 16))
    assert measure.growth.exponent == pytest.approx(1.0, abs=1e-6)
    assert [s.write_ratio for s in measure.states][1:] == pytest.approx([1 / n for n in range(1, 12)])
    assert measure.states[0].write_ratio == math.inf


def test_too_few_writes_have_no_exponent() -> None:
    assert math.isnan(measured(Adds(torch.eye(3, 8)), torch.randn(1, 5, 8)).growth.exponent)


class InPlace(nn.Module):
    """The same stream as `Adds`, kept in one tensor that every write changes."""

    def __init__(self, adds: Adds) -> None:
        super().__init__()
        self.blocks, self.norm = adds.blocks, adds.norm

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x += block(x)
        return self.norm(x)


def test_adds_in_place_give_the_numbers_of_adds_out_of_place() -> None:
    adds, x = Adds(torch.randn(6, 16)), torch.randn(2, 5, 16)
    plain, in_place = measured(adds, x), measured(InPlace(adds), x)
    assert [s.write_ratio for s in in_place.states] == [s.write_ratio for s in plain.states]
    assert [s.rms_median for s in in_place.states] == [s.rms_median for s in plain.states]
    assert in_place.entry_rms == plain.entry_rms


class Signed(nn.Module):
    """Writes by other operations than a plain sum: a − b, a + 3·b, b·(−2) + a, b + a, 0.7·a + 0.3·b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(16, 16) for _ in range(5))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        self.trunks = [x]
        x = x - self.a(self.norms[0](x))
        self.trunks.append(x)
        x = torch.add(x, self.b(self.norms[1](x)), alpha=3)
        self.trunks.append(x)
        x = torch.rsub(self.c(self.norms[2](x)), x, alpha=2)
        self.trunks.append(x)
        x = self.d(self.norms[3](x)) + x
        self.trunks.append(x)
        x = torch.lerp(x, self.e(self.norms[4](x)), 0.3)
        self.trunks.append(x)
        return self.norms[5](x)


def test_factors_of_the_operation_belong_to_the_ratio() -> None:
    model, x = Signed(), torch.randn(2, 5, 16)
    measure = measured(model, x)
    with torch.no_grad():
        model(x)
    states = [t.double() for t in model.trunks]
    for state, (before, after) in zip(measure.states, pairwise(states), strict=True):
        kept = 0.7 * before if after is states[-1] else before
        expected = (token_rms(after - kept, -1) / token_rms(kept, -1)).quantile(0.5)
        assert state.write_ratio == pytest.approx(float(expected), rel=1e-5)
    assert len(measure.states) == 5


class Accumulating(nn.Module):
    """Writes by `addmm`: the product never exists by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(5))
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.trunks = [x]
        for norm, weight in zip(self.norms, self.weights, strict=False):
            x = torch.addmm(x, norm(x), weight, beta=0.5)
            self.trunks.append(x)
        return self.norms[4](x)


def test_an_accumulating_product_is_measured_as_output_minus_accumulator() -> None:
    model, x = Accumulating(), torch.randn(10, 16)
    measure = measured(model, x)
    with torch.no_grad():
        model(x)
    states = [t.double() for t in model.trunks]
    assert len(measure.states) == 4
    for state, (before, after) in zip(measure.states, pairwise(states), strict=True):
        expected = (token_rms(after - before / 2, -1) / token_rms(before / 2, -1)).quantile(0.5)
        assert state.write_ratio == pytest.approx(float(expected), rel=1e-4)
        assert state.rms_median == pytest.approx(float(token_rms(after, -1).quantile(0.5)), rel=1e-5)


def test_tokens_that_are_zero_in_trunk_and_write_have_no_part_in_the_ratio() -> None:
    model = Adds(torch.zeros(4, 8))
    with torch.no_grad():
        for block in model.blocks:
            block.linear.weight.copy_(torch.eye(8))
    x = torch.randn(1, 5, 8)
    x[0, 3:] = 0
    assert [s.write_ratio for s in measured(model, x).states] == pytest.approx([1.0] * 4)


def test_half_precision_is_measured_in_float32() -> None:
    model = Adds(torch.full((6, 16), 200.0)).half()
    measure = measured(model, torch.full((1, 4, 16), 200.0).half())
    assert measure.basis.dtype == "float16"
    assert measure.states[-1].rms_median == pytest.approx(1400.0)
    assert measure.growth.exponent > 0


def test_a_write_with_a_nan_is_not_finite_and_has_no_exponent() -> None:
    model = Adds(torch.ones(6, 8))
    with torch.no_grad():
        model.blocks[2].linear.bias[3] = math.nan
    found, _ = measure_forward(model, torch.randn(1, 5, 8), anatomy_of(model, torch.randn(1, 5, 8)))
    (measure,) = found.residual
    assert [s.finite for s in measure.states] == [True, True, False, False, False, False]
    assert math.isnan(measure.states[2].abs_max)
    assert math.isnan(measure.states[2].rms_median)
    assert math.isnan(measure.growth.exponent)
    assert found.output_finite is False
    assert found.first_non_finite == "blocks.2.linear"


@pytest.mark.parametrize(
    ("token", "shape", "axis", "lengths", "expected"),
    [
        (17, (2, 12, 8), -1, (), 5),
        (17, (12, 2, 8), -1, (12,), 8),
        (17, (12, 12, 8), -1, (12,), 5),
        (7, (10, 8), -1, (), 7),
        (40, (2, 8, 5, 7), 1, (), 5),
        (40, (2, 5, 7, 8), -1, (), 5),
        (0, (8,), -1, (), 0),
    ],
)
def test_positions(token: int, shape: tuple[int, ...], axis: int, lengths: tuple[int, ...], expected: int) -> None:
    assert position(token, shape, axis, lengths) == expected


def test_a_sequence_first_layout_is_told_by_the_attention() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(11, 3, 16)
    anatomy = anatomy_of(model, x)
    assert anatomy.attention, "the case needs an attention site"
    found, _ = measure_forward(model, x, anatomy)
    for state in found.residual[0].states:
        assert state.position == state.rms_argmax // 3


@pytest.mark.parametrize("size", [1e-6, 1e-4, 0.1])
def test_the_direction_of_a_write_is_told_however_small_it_is(size: float) -> None:
    biases = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    model, x = Adds(biases * torch.tensor([1.0, *(size,) * 3])[:, None]), torch.zeros(1, 5, 32)
    trunk = biases[0].double()
    for state, bias in zip(measured(model, x).states[1:], biases[1:], strict=True):
        write = size * bias.double()
        cosine = float(torch.cosine_similarity(trunk, write, dim=0))
        assert state.write_cosine == pytest.approx(cosine, abs=1e-4)
        across = write - trunk * (trunk @ write) / trunk.square().sum()
        assert state.angle == pytest.approx(math.atan2(across.norm(), trunk.norm() + cosine * write.norm()), rel=1e-3)
        trunk = trunk + write


@pytest.mark.parametrize(("mean", "std"), [(100.0, 0.01), (1000.0, 1.0), (0.0, 1.0)])
def test_the_spread_about_a_far_mean(mean: float, std: float) -> None:
    x = mean + std * torch.randn(2, 40, 16)
    model = Adds(torch.zeros(2, 16))
    for state in measured(model, x).states:
        assert state.std == pytest.approx(float(x.double().std(correction=0)), rel=1e-3)
        assert state.mean == pytest.approx(float(x.double().mean()), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_stands_at_padding_has_no_part_and_a_sample_of_padding_no_first_token(value: float) -> None:
    adds, x = Adds(torch.zeros(2, 16)), torch.randn(3, 7, 16)
    stream = anatomy_of(adds, x).streams[0]
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = padding[2] = True
    handlers = write_handlers(stream, [padding])
    measure, _ = read_stream(stream, handlers, watch(adds, x.masked_fill(padding[..., None], value), handlers))
    assert measure is not None
    first = measure.states[0]
    assert first.mean == pytest.approx(float(x[~padding].mean()), rel=1e-4)
    assert first.std == pytest.approx(float(x[~padding].std(correction=0)), rel=1e-4)
    assert math.isfinite(first.token_cosine)
    assert first.first_rms == pytest.approx(float(x[:2, 0].square().mean(-1).sqrt().mean()), rel=1e-4)
